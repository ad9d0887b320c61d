"""The state and the decisions of the admission queue. Waiting is the caller's part.

The gateway waits with asyncio (`admission_queue.py`), and the simulator with simulated events. All instants are
arguments, of one clock, in seconds.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.services.gateway.http.errors import NoRoomError, Reason
from paceline.services.gateway.queueing.fair_order import Demand, FairOrder, QueueClaim, WaitingEntry
from paceline.services.gateway.queueing.shedding import LoadShedder, WaitLimit


class Held(enum.Enum):
    """The result of a try if a worker has room, but the request is held back, because workers have enough prompts."""

    HELD = "held"


HELD = Held.HELD


@dataclass(slots=True, eq=False, kw_only=True)
class Turn(WaitingEntry):
    """A request's entry in the queue. Its priority and weight are those of its claim, unless it is patient."""

    claim: QueueClaim
    demand: Demand = field(default_factory=Demand)
    late_after: float = float("inf")
    """Instant after which an admission is too late for the request's objective or deadline; infinite without both."""
    asks: bool = False
    """Whether the request is trying to be admitted at this moment."""
    aside: bool = False
    """Whether later requests may try before this one, because a worker takes long to answer its try, or because only
    workers that are gone could take it."""
    refusal: NoRoomError | None = None
    """The error for the request if it has been refused while it waits; None otherwise."""

    @property
    def may_be_refused(self) -> bool:
        return self.claim.is_ordinary and not self.asks and self.refusal is None


T = TypeVar("T", bound=Turn)


class QueueState(Generic[T]):
    """The requests in the queue. `FairOrder` decides which one is next, and `LoadShedder` which ones wait too long.

    Requests that lost their worker come before all others, in the order of their arrival.

    Args:
        max_waiting: largest number of waiting requests. Requests that lost their worker and patient ones do not count.
        queue_seconds: longest wait in the queue, in seconds. Patient entries, and requests that lost their worker, have
            no limit here.
        on_refused: called with an entry after its `refusal` was set. The entry stays in the queue until `leave`.
    """

    def __init__(self, max_waiting: int, queue_seconds: float, on_refused: Callable[[T], object]) -> None:
        self.shedder = LoadShedder(queue_seconds)
        self._on_refused = on_refused
        self._max_waiting = max_waiting
        self._order: FairOrder[T] = FairOrder()
        self._again: list[T] = []
        """Requests that lost their worker, in the order of their arrival."""
        self._ordinary = 0
        self._held_from = math.inf
        """Requests whose prompts have at least this many tokens to compute were held back since `release`."""

    def __len__(self) -> int:
        return len(self._again) + len(self._order)

    def __iter__(self) -> Iterator[T]:
        """Iterate over all entries. Requests that lost their worker come first."""
        return itertools.chain(self._again, self._order)

    def next(self) -> T | None:
        """Return the entry that may try next: the first entry that does not stand aside; None if there is none.

        Entries that were held back let shorter prompts pass. If no shorter prompt waits, the first entry that was held
        back tries again.
        """
        again = next((turn for turn in self._again if not turn.aside), None)
        return again or self._passing() or self._order.first(lambda turn: not turn.aside)

    def _passing(self) -> T | None:
        return self._order.first(lambda turn: not turn.aside and self._may_pass(turn))

    def _may_pass(self, turn: T) -> bool:
        return turn.demand.prompt_tokens < self._held_from

    def passes_all(self, turn: T) -> bool:
        """Return whether a new request may try at once: all requests in the queue were held back, and it is shorter."""
        return self._may_pass(turn) and not self._again and self._passing() is None

    def hold(self, turn: T) -> T | None:
        """Note that a request which has just tried is held back. Longer prompts would be held back, too.

        Returns the first entry of the queue that is shorter and may still try; None if there is none.
        """
        self._held_from = min(self._held_from, turn.demand.prompt_tokens)
        return self._passing()

    def begin_try(self, turn: T) -> None:
        """Note that an entry tries now. If it was held back before, all other entries may try again, too."""
        if not self._may_pass(turn):
            self.release()

    def release(self) -> None:
        """Let requests that were held back try again, because workers may have fewer prompts now."""
        self._held_from = math.inf

    def let_in(self, turn: T, now: float) -> None:
        """Raise RefusedError if an ordinary request would wait too long, or if the queue is full of requests that come
        before it. If the queue is full and the request comes before others, refuse the last of the others instead."""
        self.shedder.check(self._order, turn, turn.demand, now)
        if self._ordinary >= self._max_waiting:
            self._order.add(turn)
            last = self._order.last(lambda other: other.may_be_refused)
            self._order.remove(turn)
            if last is None or last is turn:
                raise self.refusal(turn, "queue_full", now)
            self._refuse(last, "priority" if last.priority > turn.priority else "queue_full", now)

    def join(self, turn: T, now: float) -> WaitLimit | None:
        """Put a request into the queue, and return the longest time that it may wait there; None for no limit."""
        self.shedder.rate.set_waiting(True, now)
        if turn.claim.first:
            bisect.insort(self._again, turn, key=lambda other: other.ticket)
            return None
        self._order.add(turn)
        if turn.claim.patient:
            return None
        self._ordinary += 1
        most = self.shedder.wait_limit(turn.demand, now)
        if most.reason != "timeout":
            turn.late_after = now + most.seconds
        self._refuse_late(turn, now)
        return most

    def leave(self, turn: T, now: float, *, is_served: bool) -> None:
        """Take a request out of the queue, because it is served, is refused or gives up."""
        if is_served:
            self.shedder.rate.admit(turn.work, now)
        if turn.claim.first:
            self._again.remove(turn)
        elif is_served:
            self._order.serve(turn)
        else:
            self._order.remove(turn)
        self._ordinary -= turn.claim.is_ordinary
        self.shedder.rate.set_waiting(bool(self._again or self._order), now)

    def refusal(self, turn: T, reason: Reason, now: float) -> NoRoomError:
        """Return the error for a request that is refused now."""
        return self.shedder.refusal(self._order, turn, turn.demand, WaitLimit(0.0, reason), now)

    def _refuse_late(self, newcomer: T, now: float) -> None:
        """Refuse less urgent requests that will be too late because of a new request."""
        while True:
            last = self._order.last(lambda other: other.may_be_refused and other.priority > newcomer.priority)
            if last is None or not self.shedder.is_late(self._order, last, last.late_after, now):
                return
            self._refuse(last, "priority", now)

    def _refuse(self, turn: T, reason: Reason, now: float) -> None:
        turn.refusal = self.refusal(turn, reason, now)
        self._on_refused(turn)
