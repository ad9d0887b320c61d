"""The memory in which a device computes: the host's arena itself, or a pool of its own above the arena.

A request always has blocks in the arena (`Request.tables`). A device with a pool of its own has a copy of each block
that a running request needs (`ComputePool.tables`). Full blocks are stored in the arena, where other workers find them.
So a request can be swapped out at any time: only its last, partial blocks still have to be stored. A swap-in loads the
request's blocks again. This file copies nothing: the engine takes each `CopyBatch`, has it copied, and reports that.

Pure, like the scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.block_counts import Counts
from paceline.core.context import Tail
from paceline.engine.pool_directory import BlockCopy
from paceline.engine.request import Request
from paceline.engine.step import Event

LAST = 1
"""Rank of a batch for which no request waits; it is the highest number."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Blocks of one request to copy. Batches of one request are copied in order."""

    request: Request
    loads: list[BlockCopy] = field(default_factory=list)
    """Copies from the arena into the pool."""
    stores: list[BlockCopy] = field(default_factory=list)
    """Copies from the pool into the arena."""
    events: list[Event] = field(default_factory=list)
    """Events to send after the copies."""

    @property
    def rank(self) -> int:
        """Priority of the batch; the lowest is copied first.

        Loads go first, because a request waits for them. They never need a block that is still to be stored: the
        scheduler swaps a request in only after all of its blocks have been stored.
        """
        return 0 if self.loads else LAST


class ComputePool(Protocol):
    """The owner of the blocks in the pool, and of the copies into it and out of it."""

    def tables(self, request: Request) -> list[list[int]]:
        """Return the slots of a request that is in the pool: [groups][blocks]."""

    def is_copying(self, request: Request) -> bool:
        """Return whether blocks of the request are being copied into the pool or out of it."""

    def admit(self, request: Request, tokens_per_second: float) -> bool:
        """Give a request its blocks in the pool. It cannot run before their copies are finished.

        Args:
            tokens_per_second: speed at which prompts are computed; 0 if unknown.

        Returns:
            False if there is no room now.
        """

    def extend(self, request: Request) -> bool:
        """Give a request as many blocks in the pool as its tables have. Return False if too few slots are free."""

    def note_sealed(self, request: Request, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        """Note that blocks are full. Must be called before `note_trimmed` and `hold_until_stored`."""

    def note_trimmed(self, request: Request, group: int, first_kept_block: int) -> None:
        """Note that blocks before `first_kept_block` are no longer needed."""

    def hold_until_stored(self, request: Request, events: list[Event], whole: bool = False) -> list[Event]:
        """Return the events that can be sent now. `finish_copies` returns the others when the sealed blocks are in the
        arena.

        Args:
            whole: store partial blocks, too.
        """

    def copy_tail(self, request: Request) -> tuple[tuple[int, int], ...]:
        """Plan copies of the blocks that the first `kept_len` tokens of a request fill only in part; return (from, to)
        of each.

        Returns an empty tuple if too few slots of the pool are free.
        """

    def store_tail(self, request: Request, tail: Tail) -> None:
        """Store in the arena the copies that `copy_tail` planned and a step has made. Must be called before
        `hold_until_stored`.
        """

    def drop_tail(self, request: Request) -> None:
        """Free the blocks with these copies, because they are not needed."""

    def release(self, request: Request) -> None:
        """Take back a request's blocks. No step in flight may include it, and none of its copies may be under way."""

    def take_copies(self) -> list[CopyBatch]:
        """Return the batches that were formed since the last call, in order."""

    def finish_copies(self, copies: CopyBatch, seconds: float) -> list[Event]:
        """Note that a batch was copied in `seconds` seconds. Return the events that can be sent now."""

    def forget(self) -> int:
        """Forget the blocks of the device's own pool that no request uses, and return their number."""

    def counts(self) -> Counts | None:
        """Return the numbers of slots in the device's own pool by state; None if it has no such pool. Any thread may
        call this.
        """

    def check(self, requests: Collection[Request]) -> list[str]:
        """Return a sentence for each error in the pool's state, given all requests."""


class ArenaPool:
    """The pool of a device that computes in the arena: nothing is ever copied."""

    def tables(self, request: Request) -> list[list[int]]:
        return request.tables

    def is_copying(self, request: Request) -> bool:
        return False

    def admit(self, request: Request, tokens_per_second: float) -> bool:
        return True

    def extend(self, request: Request) -> bool:
        return True

    def note_sealed(self, request: Request, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        pass

    def note_trimmed(self, request: Request, group: int, first_kept_block: int) -> None:
        pass

    def hold_until_stored(self, request: Request, events: list[Event], whole: bool = False) -> list[Event]:
        return events

    def copy_tail(self, request: Request) -> tuple[tuple[int, int], ...]:
        partial = request.partial_blocks(request.kept_len)
        return tuple((request.tables[group][block], request.spare[group]) for group, block in partial)

    def store_tail(self, request: Request, tail: Tail) -> None:
        pass

    def drop_tail(self, request: Request) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def take_copies(self) -> list[CopyBatch]:
        return []

    def finish_copies(self, copies: CopyBatch, seconds: float) -> list[Event]:
        return copies.events

    def forget(self) -> int:
        return 0

    def counts(self) -> Counts | None:
        return None

    def check(self, requests: Collection[Request]) -> list[str]:
        return []
