"""The parts from which a worker is made: its options, its client of kvtransfer, and its place in the host's arena."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.config import WorkerConfig, has_pools, quantization_of
from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KVLayout
from paceline.core.numerics import Numerics
from paceline.core.options import listed
from paceline.core.speculative import SpeculativeConfig, parse_speculative_config
from paceline.core.turns import PAGE_BYTES, PoolTurns, RoleTurns, Turns
from paceline.kernels import instruction_set_of, rounds_blocks, select_kernels
from paceline.kernels.interface import Kernels
from paceline.models.adapters.loading import AdapterRules, target_modules
from paceline.models.config import read_facts, rounds_input, weight_form
from paceline.models.files.weight_maps import WeightMaps
from paceline.models.identity import implementation_name
from paceline.models.loader import AdapterChoice
from paceline.services.worker.kv_client import KVClient
from paceline.services.worker.worker_role import WorkerRole

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """Resolved options of a worker's computation."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    has_pool: bool
    """Whether the worker computes in a pool of its own and uses the arena as the tier below."""
    numerics: Numerics

    @classmethod
    def resolve(cls, config: WorkerConfig) -> ComputeOptions:
        """Resolve the options from the model's config and this machine's devices. Raises ConfigError or ModelError."""
        device, has_pool = chosen_device(config), has_pools(config)
        if device.type == "cuda" and not has_pool:
            raise ConfigError(f"{device} cannot compute in the arena; leave out --kv-pool, or set it to device")
        dtype, kernels = _dtype(config), select_kernels(device, config.kernels)
        form = weight_form(Path(config.model), quantization_of(config))
        is_exact = form in ("gguf", "checkpoint") and rounds_blocks(kernels, dtype)
        is_exact = is_exact and not (form == "checkpoint" and rounds_input(Path(config.model)))
        code = implementation_name(Path(config.model), config.model_impl)
        type_name = str(dtype).removeprefix("torch.")
        if config.kv_coding.code:
            type_name += f" kv {config.kv_coding}"
        numerics = Numerics(instruction_set_of(kernels, device), type_name, "none" if is_exact else str(form), code)
        return cls(device, dtype, kernels, has_pool, numerics)


def chosen_device(config: WorkerConfig) -> torch.device:
    """Return the device of --device. Raises ConfigError if torch cannot use it here."""
    device = None
    with contextlib.suppress(RuntimeError):  # torch knows no such device
        device = torch.device(config.device)
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {config.device} is not supported; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {config.device}: torch finds no GPU here; use cpu, or install torch with CUDA")
    return device


def named_dtype(name: str) -> torch.dtype:
    """Return the type with this name. Raises ConfigError if nothing is computed in it."""
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name} is not supported; choose one with --dtype {' or --dtype '.join(_DTYPES)}")
    return _DTYPES[name]


def _dtype(config: WorkerConfig) -> torch.dtype:
    name: str = config.dtype
    if name == "auto":
        name = read_facts(Path(config.model), config.model_impl).dtype
        if name == "float16":
            log.info("the model's weights are float16 and are computed in bfloat16; --dtype float32 loses no bits")
            name = "bfloat16"
    return named_dtype(name)


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """A worker's share of its host: the mapped arena, and time slices on the cores."""

    arena: torch.Tensor
    """The host's arena, a flat tensor of the model's dtype."""
    path: Path
    """Path of the arena's file."""
    slots: int
    turns: RoleTurns | None
    """The worker's time slices; None if it shares its cores with no other worker."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The parts from which a process makes its worker."""

    config: WorkerConfig
    compute: ComputeOptions
    role: WorkerRole
    model_id: str
    """Digest of the model's config and tokenizer."""
    kv_client: KVClient | None
    """The worker's client of kvtransfer; None if the worker has no KV blocks."""
    undo: contextlib.AsyncExitStack
    """Functions to call when the worker's engine has stopped."""

    @property
    def folder(self) -> Path:
        return Path(self.config.model)

    @property
    def kv(self) -> KVClient:
        """The client of kvtransfer of a worker that has KV blocks."""
        assert self.kv_client is not None
        return self.kv_client

    @property
    def packed_dir(self) -> Path | None:
        """The folder in which the workers of the host share packed weights."""
        return Path(self.config.packed_dir) if self.config.packed_dir else None

    @property
    def weight_maps(self) -> WeightMaps | None:
        """The files from which the worker maps its weights; None if the weights are in memory of its own."""
        on_cpu = self.compute.device.type == "cpu"
        return WeightMaps(self.packed_dir, self.folder) if on_cpu and self.packed_dir else None

    @property
    def speculative(self) -> SpeculativeConfig | None:
        return parse_speculative_config(self.config.speculative_config)

    @property
    def adapters(self) -> AdapterChoice | None:
        """The adapters that the worker's model takes; None without --enable-lora."""
        config = self.config
        if not config.enable_lora:
            return None
        dtype = self.compute.dtype if config.lora_dtype == "auto" else named_dtype(config.lora_dtype)
        rules = AdapterRules(config.max_lora_rank, target_modules(listed(config.lora_target_modules)))
        return AdapterChoice(config.max_loras, rules, dtype)

    async def join(self, layout: KVLayout, max_position: int) -> ArenaPlace:
        """Join the host's arena.

        Args:
            max_position: tokens of the longest context that the model supports.
        """
        arena = await self.kv.session.attach(layout, self.config.max_model_len or max_position)
        blocks = torch.frombuffer(arena.blocks, dtype=self.compute.dtype)
        page = _page_of(self.config) or arena.turns
        turns = turns_of(self.config, self.compute.device, page, self.kv.session.id, self.compute.kernels.take_turns)
        if turns is not None:
            turns.take_role(self.role.name == "decode")
        return ArenaPlace(blocks, arena.path, arena.slots, turns)


def machine_turns(setup: WorkerSetup) -> PoolTurns | None:
    """Return the time slices of a pool worker; None if it shares its cores with no other worker.

    Raises ConfigError if --turns-file cannot be used.
    """
    page = _page_of(setup.config)
    if page is None or not _uses_all_cores(setup.compute.device):
        return None
    turns = PoolTurns(page)
    setup.compute.kernels.take_turns(turns)
    return turns


def _page_of(config: WorkerConfig) -> memoryview | None:
    """Return the page of --turns-file, which is made if it is missing; None without this option."""
    if not config.turns_file:
        return None
    try:
        file = os.open(config.turns_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(file, PAGE_BYTES)
            return memoryview(mmap.mmap(file, PAGE_BYTES))
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(f"--turns-file {config.turns_file} cannot be used: {error}") from error


def turns_of(
    config: WorkerConfig,
    device: torch.device,
    page: memoryview,
    session: int,
    on_change: Callable[[Turns], None] = lambda turns: None,
) -> RoleTurns | None:
    """Return the worker's time slices; None if it does not use all cores of the machine, or computes on a GPU.

    Args:
        on_change: called with the worker's turns after each change of its role, on the thread that changes the role.
    """
    if not _uses_all_cores(device):
        return None
    itl_target = config.itl_target_ms / 1000 if config.itl_target_ms else None
    return RoleTurns(page, session, itl_target, on_change)


def _uses_all_cores(device: torch.device) -> bool:
    return device.type == "cpu" and torch.get_num_threads() >= (os.cpu_count() or 1)


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
