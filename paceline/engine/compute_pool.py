"""Where the blocks lie that a device computes in: in the host's arena itself, or in a pool of its own above it.

A request always holds blocks of the arena (`Request.tables`). A device with a pool of its own has a copy of each that a
running request needs (`Request.pool_tables`). Blocks are stored in the arena as they become full, where others find
them; so a request can leave the pool at any time: only its last, partial blocks are to be stored then, and to come back
means to load. Nothing is moved here: whoever moves blocks takes the `CopyBatch` and says when they have been made.

Pure, like the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.block_pool import Counts
from paceline.engine.pool_directory import BlockCopy
from paceline.engine.request import Request
from paceline.engine.step import Event

LAST = 1
"""Rank of what nobody waits for."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Blocks of one request to be copied. Those of a request are copied in order."""

    request: Request
    loads: list[BlockCopy] = field(default_factory=list)
    """From the arena into the pool."""
    stores: list[BlockCopy] = field(default_factory=list)
    """The other way."""
    events: list[Event] = field(default_factory=list)
    """What is true once they have been made."""

    @property
    def rank(self) -> int:
        """The least is made first. A request waits for what is loaded. That it needs nothing that is still to be
        stored is a promise of the scheduler's: who left the pool comes back when all has been stored."""
        return 0 if self.loads else LAST


class ComputePool(Protocol):
    """Owns `pool_tables`, `loading` and `copies` of all requests."""

    def admit(self, request: Request, tokens_per_second: float) -> bool:
        """Gives a request its blocks in the pool; False where it has to wait. It cannot run while `loading`.

        Args:
            tokens_per_second: at which prompts are computed; 0 where nobody knows.
        """

    def extend(self, request: Request) -> bool:
        """Gives it blocks for what its tables have grown by; False where there are not enough."""

    def sealed(self, request: Request, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        """Blocks have become full. Comes before `trimmed`, and both come before `tell`."""

    def trimmed(self, request: Request, group: int, first_kept_block: int) -> None:
        """Blocks before this one are needed no more."""

    def when_stored(self, request: Request, events: list[Event], whole: bool = False) -> list[Event]:
        """Of these events those that are true already. The others come from `copied`, once the arena has what was
        sealed before; where `whole`, also what is in partial blocks."""

    def release(self, request: Request) -> None:
        """Takes back a request's blocks. No step includes it and none of its copies is under way."""

    def take_copies(self) -> list[CopyBatch]:
        """What is to be copied since the last call, in order."""

    def copied(self, copies: CopyBatch, seconds: float) -> list[Event]:
        """These have been made, in so much time. Returns what is true now."""

    def counts(self) -> Counts | None:
        """Return the slots of the device's own pool by their use; None without one. Any thread may call this."""


class ArenaPool:
    """The device computes in the arena: nothing is ever copied."""

    def admit(self, request: Request, tokens_per_second: float) -> bool:
        request.pool_tables = request.tables
        return True

    def extend(self, request: Request) -> bool:
        return True

    def sealed(self, request: Request, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        pass

    def trimmed(self, request: Request, group: int, first_kept_block: int) -> None:
        pass

    def when_stored(self, request: Request, events: list[Event], whole: bool = False) -> list[Event]:
        return events

    def release(self, request: Request) -> None:
        request.pool_tables = None

    def take_copies(self) -> list[CopyBatch]:
        return []

    def copied(self, copies: CopyBatch, seconds: float) -> list[Event]:
        return copies.events

    def counts(self) -> Counts | None:
        return None
