"""Which blocks lie in a device's pool, for other processes that can read it.

A request always holds blocks of the arena; a pool has copies of some. The directory has one entry for each slot of the
arena: where in the pool its copy is, and what that contains. Whoever reads a block from a pool that goes on being
written asks nobody: it notes the entry's stamp, copies, and looks whether the stamp is still the same. Where it is not,
the block may have been overwritten meanwhile, and the copy counts for nothing.

Pure: the memory is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from paceline.core.context import HASH_BYTES

_GROUP_BYTES = 4
_NAME = np.dtype(f"V{_GROUP_BYTES + HASH_BYTES}")
_ENTRY = np.dtype([("stamp", "<u8"), ("slot", "<u4"), ("name", _NAME)])


class BlockCopy(NamedTuple):
    """A block on its way between the pool and the arena."""

    pool_slot: int
    arena_slot: int
    group: int
    digest: bytes
    """What is in it (`Request.hash_of`)."""
    is_full: bool = True
    """Otherwise its content may still change."""


class PeerPools(Protocol):
    """Pools of other workers on the same device."""

    def load(self, moves: Sequence[BlockCopy]) -> list[BlockCopy]:
        """Copies what they have into this worker's pool, and waits for it. Returns what they have not."""

    def drop_ended(self) -> None:
        """Lets go of those that have ended. Called often, also where there is nothing to load."""


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks that were in the pool when it was looked."""

    indices: np.ndarray
    """int64 [found]: of the moves that were asked about."""
    pool_slots: np.ndarray
    arena_slots: np.ndarray
    stamps: np.ndarray


class PoolDirectory:
    """Written by one process, in one thread; read by any.

    Args:
        memory: shared, zero at first, at a multiple of 8 bytes; of the size that `bytes_for` says.
        slots: of the pool.
    """

    def __init__(self, memory: memoryview, arena_slots: int, slots: int) -> None:
        self._entries = np.frombuffer(memory, _ENTRY, arena_slots)
        self._stamps = self._entries["stamp"]
        self._slots = slots
        self._next = itertools.count(1)
        self._places: dict[int, int] = {}  # by slot of the pool, in which entry it was told last

    @staticmethod
    def bytes_for(arena_slots: int) -> int:
        return arena_slots * _ENTRY.itemsize

    # ---- the writer

    def publish(self, moves: Iterable[BlockCopy]) -> None:
        """The device has written these blocks to the end, and they do not change until they are withdrawn."""
        for move in moves:
            self.withdraw((move.pool_slot,))
            entry = self._entries[move.arena_slot]
            # Nobody may take one entry's stamp for another's: it goes first, and comes last.
            entry["stamp"] = 0
            entry["slot"], entry["name"] = move.pool_slot, np.void(_name(move))
            entry["stamp"] = next(self._next)
            self._places[move.pool_slot] = move.arena_slot

    def withdraw(self, pool_slots: Iterable[int]) -> None:
        """What is in these slots will change. Comes before the step or the copy that writes there is launched."""
        for slot in pool_slots:
            place = self._places.pop(slot, None)
            if place is not None and self._entries["slot"][place] == slot:
                self._stamps[place] = 0

    # ---- readers

    def find(self, moves: Sequence[BlockCopy]) -> Found:
        """Which of these blocks can be read from the pool now."""
        places = np.fromiter((move.arena_slot for move in moves), np.int64, len(moves))
        stamps = self._stamps[places]
        entries = self._entries[places]  # behind the stamps, see `publish`
        wanted = np.frombuffer(b"".join(map(_name, moves)), _NAME)
        (indices,) = np.nonzero((stamps != 0) & (entries["name"] == wanted) & (entries["slot"] < self._slots))
        return Found(indices, entries["slot"][indices], places[indices], stamps[indices])

    def unchanged(self, found: Found) -> list[int]:
        """Those of the indices whose blocks were all the time what they were when they were found."""
        kept: list[int] = found.indices[self._stamps[found.arena_slots] == found.stamps].tolist()
        return kept


def _name(move: BlockCopy) -> bytes:
    return move.group.to_bytes(_GROUP_BYTES, "little") + move.digest
