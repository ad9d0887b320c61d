"""Decode workers that wait for their prompts. Each adopts its lease as part of the operation that fills the lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.errors import PacelineError, StaleError
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.lease import Lease, State
from paceline.services.kvtransfer.ledger.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Waiter:
    """A worker that waits until it can adopt a lease."""

    session: int
    """Number of the session of the worker, which reserved the lease."""
    key: Key
    """The lease's key, with any generation since the reservation."""
    tell: Callable[[Lease | PacelineError], None]
    """Called once, with the adopted lease or with the error that prevented the adoption."""
    is_connected: Callable[[], bool]
    """Returns whether the worker is still connected. A worker that is not connected adopts nothing."""


class Adoptions:
    """Lets waiting workers adopt leases as soon as the leases are filled.

    This happens inside the call that reports the filled lease, because a task of its own would delay the handoff.

    Args:
        clock: the ledger's clock, in seconds.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._waiting: dict[tuple[str, int], Waiter] = {}
        """Waiting workers by request and attempt."""

    def wait(self, waiter: Waiter) -> None:
        """Let a worker adopt its lease, now or as soon as the lease is filled. Only one worker can wait for a lease."""
        self.note(waiter.key)  # removes an earlier waiter that has left, or whose lease has ended
        if waiter.key[:2] in self._waiting:
            waiter.tell(StaleError(f"lease {waiter.key} has a waiting worker already"))
        else:
            self._waiting[waiter.key[:2]] = waiter
            self.note(waiter.key)

    def note(self, key: Key) -> None:
        """Check whether a lease has been filled or has ended, and if so tell the worker that waits for it."""
        waiter = self._waiting.pop(key[:2], None)
        if waiter is None or not waiter.is_connected():
            return
        outcome: Lease | PacelineError
        try:
            lease = self._own(waiter)
            if lease.state is not State.FILLED:
                self._waiting[key[:2]] = waiter  # go on waiting
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
