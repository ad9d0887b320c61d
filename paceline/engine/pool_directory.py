"""A directory of the blocks in a device's pool, for other processes that can read the pool.

A request always has blocks in the arena, and a pool has copies of some of them. The directory has one entry for each
slot of the arena: the slot in the pool that has a copy, and the name of its content. A reader needs no lock, although
the owner of the pool goes on writing: it reads the entry's stamp, copies the block, and reads the stamp again. If the
stamp has changed, the block may have been overwritten meanwhile, and the reader drops its copy.

Processors other than x86 may reorder loads and stores, so fences separate accesses to stamps from accesses to entries
and blocks. A stamp is an aligned word, which is read and written as a whole.

Pure: the caller gives the memory and the fence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from paceline.core.context import HASH_BYTES

_GROUP_BYTES = 4
_NAME = np.dtype(f"V{_GROUP_BYTES + HASH_BYTES}")
_ENTRY = np.dtype([("stamp", "<u8"), ("slot", "<u4"), ("name", _NAME)])


class BlockCopy(NamedTuple):
    """A copy of one block between the pool and the arena."""

    pool_slot: int
    arena_slot: int
    group: int
    digest: bytes
    """Name of the block's content (`Request.hash_of`)."""
    is_full: bool = True
    """Whether the block is full. The content of a partial block may still change."""


class PeerPools(Protocol):
    """The pools of other workers on the same device."""

    def load(self, moves: Sequence[BlockCopy]) -> list[BlockCopy]:
        """Copy blocks from these pools into this worker's pool, and wait until they are copied. Return the blocks that
        none of these pools has.
        """

    def drop_ended(self) -> None:
        """Close the pools of workers that have ended. The caller does this often, even if there is nothing to load."""


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """Blocks that were in the pool when `PoolDirectory.find` looked for them."""

    indices: np.ndarray
    """int64 [found]: index of each found block in the argument of `PoolDirectory.find`."""
    pool_slots: np.ndarray
    arena_slots: np.ndarray
    stamps: np.ndarray


class PoolDirectory:
    """A directory that one thread of one process writes, and any process reads.

    Args:
        memory: shared memory of `bytes_for(arena_slots)` bytes, aligned to 8 bytes, zeros at first.
        slots: number of slots of the pool.
        fence: a memory fence: all processes see this thread's reads and writes before the call ahead of those after it.
    """

    def __init__(self, memory: memoryview, arena_slots: int, slots: int, fence: Callable[[], None]) -> None:
        self._fence = fence
        self._entries = np.frombuffer(memory, _ENTRY, arena_slots)
        self._stamps = self._entries["stamp"]
        self._slots = slots
        self._next = itertools.count(1)
        self._places: dict[int, int] = {}  # slot of the pool: index of the entry that was last written for it

    @staticmethod
    def bytes_for(arena_slots: int) -> int:
        return arena_slots * _ENTRY.itemsize

    # ---- the writer

    def publish(self, moves: Iterable[BlockCopy]) -> None:
        """Add blocks that are complete in the pool. These blocks must not change until they are withdrawn."""
        for move in moves:
            self._clear(move.pool_slot)
            # The stamp is cleared first and set last, so that no reader sees it with parts of another entry.
            self._stamps[move.arena_slot] = 0
            self._fence()
            entry = self._entries[move.arena_slot]
            entry["slot"], entry["name"] = move.pool_slot, np.void(_name(move))
            self._fence()
            self._stamps[move.arena_slot] = next(self._next)
            self._places[move.pool_slot] = move.arena_slot

    def withdraw(self, pool_slots: Iterable[int]) -> None:
        """Remove blocks. Must be called before the launch of a step or copy that writes to these slots."""
        for slot in pool_slots:
            self._clear(slot)
        self._fence()  # clears the stamps before the writes

    def _clear(self, pool_slot: int) -> None:
        place = self._places.pop(pool_slot, None)
        if place is not None and self._entries["slot"][place] == pool_slot:
            self._stamps[place] = 0

    # ---- readers

    def find(self, moves: Sequence[BlockCopy]) -> FoundBlocks:
        """Find the blocks that can be read from the pool now."""
        places = np.fromiter((move.arena_slot for move in moves), np.int64, len(moves))
        stamps = self._stamps[places]
        self._fence()  # reads the stamps before the entries and blocks
        entries = self._entries[places]
        wanted = np.frombuffer(b"".join(map(_name, moves)), _NAME)
        (indices,) = np.nonzero((stamps != 0) & (entries["name"] == wanted) & (entries["slot"] < self._slots))
        return FoundBlocks(indices, entries["slot"][indices], places[indices], stamps[indices])

    def unchanged(self, found: FoundBlocks) -> list[int]:
        """Return the indices of found blocks that have not changed since they were found."""
        self._fence()  # reads the blocks before the stamps
        kept: list[int] = found.indices[self._stamps[found.arena_slots] == found.stamps].tolist()
        return kept


def _name(move: BlockCopy) -> bytes:
    return move.group.to_bytes(_GROUP_BYTES, "little") + move.digest
