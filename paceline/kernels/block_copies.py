"""Copies of KV blocks between the device's pool and the host's arena."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from paceline.kernels.native.library import can_copy, copy_blocks
from paceline.kernels.transfer import to_device

_KERNEL_BYTES = 28 << 10
"""Block size in bytes below which one kernel moves many blocks faster than the copy engine moves them one by one."""


class Copy:
    """A batch of copies that has begun. On a CPU it has ended already."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def done(self) -> bool:
        """Return whether the copies have ended, so that targets may be read and sources overwritten. Never waits."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the copies have ended."""
        if self._event is not None:
            self._event.synchronize()

    def precede(self) -> None:
        """Make later work on the calling thread's current stream wait for the copies. The host does not wait."""
        if self._event is not None:
            self._event.wait()


class BlockCopies:
    """Copies blocks between a pool on the device and the arena of the host while the device computes.

    Each direction has a stream of its own. Copies begin after the work that the calling thread launched earlier. So
    they read the results of this work, and overwrite nothing that this work still reads.

    Args:
        pool: [slots, slot_elements] on the device.
        arena: [slots, slot_elements] of the host, of the same dtype; pinned if the device is a GPU.
        kernel_bytes: a kernel moves blocks of fewer bytes, the copy engine others; None for the best value.

    Raises:
        ValueError: the shapes or dtypes of pool and arena differ, or the arena is not pinned.
    """

    def __init__(self, pool: Tensor, arena: Tensor, kernel_bytes: int | None = None) -> None:
        if pool.shape[1] != arena.shape[1] or pool.dtype != arena.dtype:
            raise ValueError(
                f"the pool has blocks of {pool.shape[1]} {pool.dtype}, the arena {arena.shape[1]} {arena.dtype}"
            )
        on_gpu = pool.device.type == "cuda"
        if on_gpu and not arena.is_pinned():
            raise ValueError("the arena must be pinned: a copy from other memory makes the host wait")
        self._pool = pool
        self.arena = arena
        if kernel_bytes is None:
            kernel_bytes = _KERNEL_BYTES if on_gpu else 0
        self._by_kernel = pool.shape[1] * pool.itemsize < kernel_bytes
        self._natively = not on_gpu and can_copy(pool) and can_copy(arena)
        self._out, self._in = (_stream(pool.device) if on_gpu else None for _ in range(2))

    def store(self, pool_slots: Sequence[int], arena_slots: Sequence[int]) -> Copy:
        """Copy arena[arena_slots[i]] = pool[pool_slots[i]]. All arena slots must be different."""
        return self._copy(self._out, self.arena, arena_slots, self._pool, pool_slots)

    def load(self, arena_slots: Sequence[int], pool_slots: Sequence[int]) -> Copy:
        """Copy pool[pool_slots[i]] = arena[arena_slots[i]]. All pool slots must be different."""
        return self._copy(self._in, self._pool, pool_slots, self.arena, arena_slots)

    def load_from(self, pool: Tensor, slots: Sequence[int], pool_slots: Sequence[int]) -> Copy:
        """Copy block `slots[i]` of `pool`, another pool on the same device, to slot `pool_slots[i]` of this pool."""
        return self._copy(self._in, self._pool, pool_slots, pool, slots)

    def _copy(
        self,
        stream: torch.cuda.Stream | None,
        target: Tensor,
        target_slots: Sequence[int],
        source: Tensor,
        source_slots: Sequence[int],
    ) -> Copy:
        _check(target, target_slots, source, source_slots)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        with _on(stream):
            # Within a GPU's own memory a kernel is always faster than the copy engine.
            if target_slots and (self._by_kernel or (target.is_cuda and source.is_cuda)):
                both = torch.tensor([target_slots, source_slots], dtype=torch.int64, device="cpu")
                slots = to_device(both, self._pool.device)
                # Imported here, because a CPU does not need Triton.
                from paceline.kernels.triton_kernels.blocks import move_blocks

                move_blocks(target, source, slots[0], slots[1])
            elif self._natively:
                copy_blocks(target, target_slots, source, source_slots)
            else:
                for to, begin, count in runs(target_slots, source_slots):
                    target[to : to + count].copy_(source[begin : begin + count], non_blocking=True)
        return Copy(stream.record_event() if stream is not None else None)


def runs(target_slots: Sequence[int], source_slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield each run of slots that are consecutive in both lists: first target slot, first source slot, number of
    blocks.
    """
    first = 0
    for end in range(1, len(target_slots) + 1):
        count = end - first
        goes_on = end < len(target_slots) and (
            (target_slots[end], source_slots[end]) == (target_slots[first] + count, source_slots[first] + count)
        )
        if not goes_on:
            yield target_slots[first], source_slots[first], count
            first = end


def _check(target: Tensor, target_slots: Sequence[int], source: Tensor, source_slots: Sequence[int]) -> None:
    """Check that all slots exist. Any other slot would be in somebody else's memory."""
    if len(target_slots) != len(source_slots):
        raise ValueError(f"{len(source_slots)} blocks cannot go to {len(target_slots)} slots")
    for tensor, slots in ((target, target_slots), (source, source_slots)):
        if slots and not (min(slots) >= 0 and max(slots) < len(tensor)):
            raise IndexError(f"slots {min(slots)} to {max(slots)} are needed; there are slots 0 to {len(tensor) - 1}")


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()
