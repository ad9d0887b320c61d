"""Decode workers that wait for their prompts: each gets its lease with the operation that fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.errors import PacelineError, StaleError
from paceline.core.types import Key
from paceline.services.kvtransfer.lease import Lease, State
from paceline.services.kvtransfer.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Waiter:
    """A worker that waits for its lease."""

    session: int
    """Of the worker that reserved it."""
    key: Key
    """Any of the lease's generations since then."""
    tell: Callable[[Lease | PacelineError], None]
    """Called once, with the adopted lease or the reason why there is none."""
    is_heard: Callable[[], bool]
    """Whether it still listens; where not, it gets nothing."""


class Adoptions:
    """Gives leases to their new owners as soon as they are filled. No task stands in between, which a handoff would
    wait for.

    Args:
        clock: that of the ledger, in seconds.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._waiting: dict[tuple[str, int], Waiter] = {}
        """By request and attempt."""

    def wait(self, waiter: Waiter) -> None:
        self.note(waiter.key)  # who waits already may be gone, or wait for what has ended
        if waiter.key[:2] in self._waiting:
            waiter.tell(StaleError(f"lease {waiter.key} is being waited for already"))
        else:
            self._waiting[waiter.key[:2]] = waiter
            self.note(waiter.key)

    def note(self, key: Key) -> None:
        """This lease may have been filled, or have ended."""
        waiter = self._waiting.pop(key[:2], None)
        if waiter is None or not waiter.is_heard():
            return
        outcome: Lease | PacelineError
        try:
            lease = self._own(waiter)
            if lease.state is not State.FILLED:
                self._waiting[key[:2]] = waiter  # it waits on
                return
            outcome = self._ledger.adopt(waiter.session, lease.key, self._clock())
        except PacelineError as error:
            outcome = error
        waiter.tell(outcome)

    def _own(self, waiter: Waiter) -> Lease:
        lease = self._ledger.find(waiter.key, self._clock())
        if lease.owner != waiter.session:
            raise StaleError(f"lease {waiter.key} belongs to another worker")
        if lease.state is State.ACTIVE:
            raise StaleError(f"lease {waiter.key} was adopted already")
        return lease
