"""Memory of a worker's KV blocks: the host's arena, or the worker's own pool with the arena as the tier below."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.config import KV_TOKENS
from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.kv_layout import KVLayout
from paceline.core.machine import available_memory
from paceline.core.options import parse_bytes
from paceline.engine.compute_pool import ArenaPool, ComputePool
from paceline.engine.device_pool import DevicePool
from paceline.kernels.block_copies import BlockCopies
from paceline.services.worker.shared_pools import SharedPool, SharedPools, remove_ended

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The memory in which a worker computes.

    Args:
        pool: flat tensor of the cache's dtype; the arena if the worker has no pool of its own.
        copies: copies between the worker's own pool and the arena; None if it computes in the arena.
        shared: the worker's own pool, for other workers to read; None if they cannot.
        peers: pools of other workers, if this worker can read them.
    """

    layout: KVLayout
    pool: torch.Tensor
    copies: BlockCopies | None = None
    shared: SharedPool | None = None
    peers: SharedPools | None = None

    @property
    def arena(self) -> torch.Tensor:
        """The host's arena, a flat tensor of the cache's dtype."""
        return self.pool if self.copies is None else self.copies.arena.view(-1)

    @property
    def slots(self) -> int:
        return self.pool.nbytes // self.layout.slot_bytes

    def compute_pool(self) -> ComputePool:
        """Return a new account of the pool's slots. The pool counts as empty."""
        if self.copies is None:
            return ArenaPool()
        return DevicePool(self.layout, self.slots, self.shared.directory if self.shared else None)

    def check_sleep(self) -> None:
        """Raise InvalidRequestError if the blocks are on a device that needs the arena's memory as long as it lives."""
        if self.pool.device.type != "cpu":
            raise InvalidRequestError(
                f"this worker's KV blocks are on the device {self.pool.device}, for whose copies the arena's memory is "
                "pinned, so it cannot give this memory back; only workers on a CPU sleep"
            )

    def give_back(self) -> None:
        """Give the memory of the worker's own pool back to the system. It must have no blocks."""
        if self.shared is not None:
            self.shared.give_back()

    def take_back(self) -> None:
        """Allocate the memory of the worker's own pool again. Raises BusyError if there is too little memory now."""
        if self.shared is not None:
            self.shared.take_back()

    def close(self) -> None:
        """Stop sharing pools with other processes. The engine must have stopped."""
        for part in (self.peers, self.shared):
            if part is not None:
                part.close()


def device_memory(
    layout: KVLayout, arena: torch.Tensor, path: Path, device: torch.device, size: str, context_tokens: int
) -> KVMemory:
    """Make a pool on the device, with the arena as the tier below.

    Args:
        arena: the arena as a flat tensor of the cache's dtype.
        path: the arena's file. The pool's file is made beside it.
        size: memory of the pool, like 512MiB. "auto" has room for KV_TOKENS tokens, or for the longest context
            if it needs more.
        context_tokens: number of tokens of the longest context.

    Raises:
        ConfigError: the device has not enough free memory, or the arena cannot be pinned.
    """
    if size == "auto":
        slots = max(map(layout.slots_for, (KV_TOKENS, context_tokens)))
    else:
        slots = parse_bytes(size) // layout.slot_bytes
    remove_ended(path)
    _check_room(slots * layout.slot_bytes, device)
    elements = layout.slot_bytes // layout.itemsize
    blocks = arena[: arena.numel() // elements * elements].view(-1, elements)
    shared: SharedPool | None = None
    try:
        shared = SharedPool(path, len(blocks), layout, slots, arena.dtype, device)
    except (ConfigError, OSError, RuntimeError) as error:
        log.warning("other workers cannot read this worker's KV pool and get its blocks through the arena: %s", error)
    pool = shared.pool if shared else torch.zeros(slots * elements, dtype=arena.dtype, device=device)
    if device.type == "cuda":
        _pin(arena)
    copies = BlockCopies(pool.view(slots, elements), blocks)
    return KVMemory(layout, pool, copies, shared, SharedPools(shared, copies) if shared else None)


def _check_room(size: int, device: torch.device) -> None:
    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if room is not None and room < size:
        raise ConfigError(
            f"the KV pool needs {size >> 20:,} MiB and {device} has only {room >> 20:,} MiB free; "
            "lower it with --kv-pool-memory"
        )


def _pin(arena: torch.Tensor) -> None:
    """Pin the arena, so that a GPU can copy from and to it while the CPU goes on. Raises ConfigError."""
    # Pinning is never undone, because the arena stays mapped for the life of the process.
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(arena.data_ptr(), arena.nbytes, 0)
    if int(code) != 0:
        raise ConfigError(f"the arena cannot be pinned for the GPU (CUDA error {int(code)}); lower --kv-memory")
