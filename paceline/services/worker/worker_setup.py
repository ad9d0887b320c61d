"""The parts of which a worker is made: its process, its options, and its place in the host's arena."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.config import WorkerConfig
from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KVLayout
from paceline.core.speculative import SpeculativeConfig, parse_speculative_config
from paceline.core.turns import RoleTurns, Turns
from paceline.services.worker.compute_options import ComputeOptions
from paceline.services.worker.kv_client import KVClient
from paceline.services.worker.worker_role import WorkerRole

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """A worker's place on its host."""

    arena: torch.Tensor
    """The host's arena, a flat tensor of the model's dtype."""
    path: Path
    """The arena's file."""
    slots: int
    turns: RoleTurns | None
    """The worker's time slices; None if it shares its cores with no other worker."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The parts of which a worker is made in its own process."""

    config: WorkerConfig
    compute: ComputeOptions
    role: WorkerRole
    model_id: str
    """Digest of the model's config and tokenizer."""
    kv: KVClient
    undo: contextlib.AsyncExitStack
    """Functions to call when the worker's engine has stopped."""

    @property
    def folder(self) -> Path:
        return Path(self.config.model)

    @property
    def packed_dir(self) -> Path | None:
        """The folder in which the workers of the host share packed weights."""
        return Path(self.config.packed_dir) if self.config.packed_dir else None

    @property
    def speculative(self) -> SpeculativeConfig | None:
        return parse_speculative_config(self.config.speculative_config)

    async def join(self, layout: KVLayout, max_position: int) -> ArenaPlace:
        """Join the host's arena.

        Args:
            max_position: tokens of the longest context that the model supports.
        """
        arena = await self.kv.session.attach(layout, self.config.max_model_len or max_position)
        blocks = torch.frombuffer(arena.blocks, dtype=self.compute.dtype)
        turns = turns_of(
            self.config, self.compute.device, arena.turns, self.kv.session.id, self.compute.kernels.take_turns
        )
        if turns is not None:
            turns.take_role(self.role.name == "decode")
        return ArenaPlace(blocks, arena.path, arena.slots, turns)


def turns_of(
    config: WorkerConfig,
    device: torch.device,
    page: memoryview,
    session: int,
    on_change: Callable[[Turns], None] = lambda turns: None,
) -> RoleTurns | None:
    """Return the worker's time slices; None if it does not use all cores of the machine, or computes on a GPU.

    Args:
        on_change: see `RoleTurns`.
    """
    if device.type != "cpu" or torch.get_num_threads() < (os.cpu_count() or 1):
        return None
    itl_target = config.itl_target_ms / 1000 if config.itl_target_ms else None
    return RoleTurns(page, session, itl_target, on_change)


def max_model_len(config: WorkerConfig, layout: KVLayout, max_position: int, arena_slots: int, pool_slots: int) -> int:
    """Return the tokens of the longest context that the model, the KV memory and the user allow. Raises ConfigError."""
    option = "--kv-pool-memory" if pool_slots < arena_slots else "--kv-memory"
    wanted = config.max_model_len or max_position
    if wanted > max_position:
        raise ConfigError(f"--max-model-len {wanted} is more than the model's {max_position}")
    fitting = wanted
    while layout.slots_for(fitting) > pool_slots or layout.arena_slots_for(fitting) > arena_slots:
        fitting -= layout.alignment
    if fitting < 1 or (config.max_model_len and fitting < wanted):
        raise ConfigError(
            f"the KV memory has room for one context of {max(fitting, 0)} tokens, not {wanted}; "
            f"raise {option} or lower --max-model-len"
        )
    if fitting < wanted:
        why = "contexts are limited to %d tokens, because the KV memory has no room for %d; raise %s"
        log.warning(why, fitting, wanted, option)
    return fitting
