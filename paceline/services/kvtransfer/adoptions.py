"""Decode workers that wait for their prompts: each gets its hold with the operation that fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.errors import StaleError
from paceline.core.types import Key
from paceline.services.kvtransfer.hold import Hold, State
from paceline.services.kvtransfer.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Waiter:
    """A worker that waits for its hold."""

    session: int
    """Of the worker that reserved it."""
    key: Key
    """Any of the hold's generations since then."""
    tell: Callable[[Hold | StaleError], None]
    """Called once: with the hold, which is the worker's now, or with why it is not, or not any more, for this worker to
    wait for."""
    is_there: Callable[[], bool]
    """Whether it still wants to hear; who does not gets nothing."""


class Adoptions:
    """Makes holds their owners' as soon as they are filled. Nothing is awaited in between: a handoff waits for it.

    Args:
        clock: that of the ledger, in seconds.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._waiting: dict[tuple[str, int], Waiter] = {}
        """By request and attempt."""

    def wait(self, waiter: Waiter) -> None:
        other = self._waiting.get(waiter.key[:2])
        if other is not None and other.is_there():
            waiter.tell(StaleError(f"hold {waiter.key} is being waited for already"))
        else:
            self._waiting[waiter.key[:2]] = waiter
            self.note(waiter.key)

    def note(self, key: Key) -> None:
        """This hold may have been filled, or have ended."""
        waiter = self._waiting.get(key[:2])
        if waiter is None:
            return
        if not waiter.is_there():
            del self._waiting[key[:2]]
            return
        outcome: Hold | StaleError | None
        try:
            outcome = self._adopt(waiter)
        except StaleError as error:
            outcome = error
        if outcome is not None:
            del self._waiting[key[:2]]
            waiter.tell(outcome)

    def _adopt(self, waiter: Waiter) -> Hold | None:
        """None where the hold is not filled yet."""
        now = self._clock()
        hold = self._ledger.find(waiter.key, now)
        if hold.owner != waiter.session:
            raise StaleError(f"hold {waiter.key} belongs to another worker")
        if hold.state is State.ACTIVE:
            raise StaleError(f"hold {waiter.key} was adopted already")
        return self._ledger.adopt(waiter.session, hold.key, now) if hold.state is State.FILLED else None
