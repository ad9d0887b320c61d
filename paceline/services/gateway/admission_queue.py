"""The queue of requests for which no worker has room."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from paceline.services.gateway.queueing.claim import ORDINARY, Claim, Demand
from paceline.services.gateway.queueing.fair_order import Entry, FairOrder, next_ticket
from paceline.services.gateway.queueing.shedding import LoadShedder, Reason, RefusedError, WaitLimit

POLL_SECONDS = (0.025, 0.1)
"""Seconds between two tries of the request at the head of the queue. A call of this gateway that ends wakes it at once;
it has to poll because calls of other gateways may end, too."""

ASIDE_SECONDS = 0.2
"""Seconds after which the next request in the queue may try although an earlier one still waits for its answer. Most
answers come within milliseconds; they take longer if a prefix is fetched to the worker's host first."""

IDLE_SECONDS = (0.2, 0.6)
"""Seconds between two tries of a patient sequence of the background, or of a request that stands aside."""

T = TypeVar("T")


@dataclass(slots=True, eq=False, kw_only=True)
class _Turn(Entry):
    """A request's entry in the queue."""

    claim: Claim
    demand: Demand = field(default_factory=Demand)
    late_after: float = float("inf")
    """When its objective or its deadline is missed."""
    may_ask: asyncio.Event = field(default_factory=asyncio.Event)
    asks: bool = False
    """Whether it tries to be admitted just now."""
    aside: bool = False
    """Whether later requests do not wait for it: its answer takes long, or only workers that are gone could take it."""
    refusal: RefusedError | None = None
    """Set if it is refused while it waits."""

    @property
    def may_be_refused(self) -> bool:
        return self.claim.is_ordinary and not self.asks and self.refusal is None


class AdmissionQueue:
    """A queue in which requests are served by priority, and keys of equal priority share by their weights.

    `FairOrder` says who is next, and `LoadShedder` who is refused because it would wait too long. Two exceptions:

    Requests that lost their worker come before all others, in the order of their arrival.

    A patient entry is a sequence whose client is already being served: a further choice of its request. A request may
    have many choices, so only one patient entry stands in the queue at a time. When it leaves, the next one joins at
    the end. Together they delay the others as much as one more client would. Their priority does not count: all
    patient entries wait for the one in the queue, so a less urgent one there would hold back the others.

    While the queue is empty, new requests try at once, several at a time. So a slow answer delays only the request that
    waits for it. In the queue, requests try one after another; after `ASIDE_SECONDS` without an answer the next one
    tries, too. A request that gets no room keeps its place before later arrivals, however long the answer took.

    Args:
        max_waiting: the most waiting requests, not counting those that lost their worker and patient ones.
        queue_seconds: the longest time in the queue. Patient entries, and requests that lost their worker, have
            no limit here.
    """

    def __init__(self, max_waiting: int, queue_seconds: float) -> None:
        self.shedder = LoadShedder(queue_seconds)
        self.on_wait: Callable[[], object] = lambda: None
        """Called when a request begins to wait."""
        self.on_refused: Callable[[str, Reason], object] = lambda request_class, reason: None
        """Called with the class of a request that is refused, and the reason."""
        self._max_waiting = max_waiting
        self._queue_seconds = queue_seconds
        self._order: FairOrder[_Turn] = FairOrder()
        self._again: list[_Turn] = []
        """Requests that lost their worker, in the order of their arrival."""
        self._turn_of_patient = asyncio.Lock()
        self._waiting = 0
        self._ordinary = 0

    def __len__(self) -> int:
        """Return the number of waiting requests, with the patient ones that have not joined the queue yet."""
        return self._waiting

    @property
    def deferred(self) -> int:
        """Number of patient entries that have not joined the queue, because an earlier one stands in it."""
        return self._waiting - len(self._order) - len(self._again)

    def count(self, fits: Callable[[Claim], bool]) -> int:
        """Return the number of requests in the queue for which `fits` is true."""
        return sum(fits(turn.claim) for turn in (*self._again, *self._order))

    async def admit(self, attempt: Callable[[], Awaitable[T | None]], claim: Claim = ORDINARY) -> T:
        """Call `attempt` each time it is this request's turn, until there is room, and return its result.

        Args:
            attempt: a function that tries to admit the request; it returns None if there is no room now.

        Raises:
            RefusedError: the request would wait too long, or has waited too long, or more urgent ones took its place;
                or no room is idle for the background.
        """
        if claim.background:
            return await self._use_idle_room(attempt, claim)
        priority = 0 if claim.patient else claim.priority
        turn = _Turn(owner=claim.owner, weight=claim.weight, priority=priority, claim=claim)
        if not self._waiting and (admitted := await attempt()) is not None:
            return admitted
        turn.demand = claim.measure()
        turn.work = turn.demand.work
        if claim.is_ordinary:
            self._let_in(turn)
        self._waiting += 1
        self._ordinary += claim.is_ordinary
        self.on_wait()
        try:
            async with self._turn_of_patient if claim.patient else contextlib.nullcontext():
                if claim.patient:
                    turn.ticket = next_ticket()
                if not claim.is_ordinary:
                    # An ordinary request has just tried, or stands after one that has. These two may not have tried.
                    turn.may_ask.set()
                return await self._stand(turn, attempt)
        finally:
            self._waiting -= 1
            self._ordinary -= claim.is_ordinary

    def wake(self) -> None:
        """Let the request at the head of the queue try again, because there may be room now."""
        if (turn := self._next()) is not None:
            turn.may_ask.set()

    async def _use_idle_room(self, attempt: Callable[[], Awaitable[T | None]], claim: Claim) -> T:
        while True:
            if not self._waiting and (admitted := await attempt()) is not None:
                return admitted
            if not claim.patient:
                message = "no worker is idle; work of the background is tried again later"
                raise self._counted(claim, RefusedError(message, "background"))
            await asyncio.sleep(random.uniform(*IDLE_SECONDS))

    def _let_in(self, turn: _Turn) -> None:
        """Raise RefusedError if a request that has to wait would wait too long, or if the queue is full of others that
        come before it. If it comes before others in a full queue, the last one of them is refused."""
        now = time.monotonic()
        try:
            self.shedder.check(self._order, turn, turn.demand, now)
            if self._ordinary >= self._max_waiting:
                self._order.add(turn)
                last = self._order.last(lambda other: other.may_be_refused)
                self._order.remove(turn)
                if last is None or last is turn:
                    raise self._refusal(turn, "queue_full")
                self._refuse(last, "priority" if last.priority > turn.priority else "queue_full")
        except RefusedError as refusal:
            raise self._counted(turn.claim, refusal) from None

    def _refuse_late(self, newcomer: _Turn) -> None:
        """Refuse less urgent requests that will be too late because of a new one."""
        now = time.monotonic()
        while True:
            last = self._order.last(lambda other: other.may_be_refused and other.priority > newcomer.priority)
            if last is None or not self.shedder.is_late(self._order, last, last.late_after, now):
                return
            self._refuse(last, "priority")

    def _refuse(self, turn: _Turn, reason: Reason) -> None:
        turn.refusal = self._refusal(turn, reason)
        turn.may_ask.set()

    def _refusal(self, turn: _Turn, reason: Reason) -> RefusedError:
        return self.shedder.refusal(self._order, turn, turn.demand, WaitLimit(0.0, reason), time.monotonic())

    def _counted(self, claim: Claim, refusal: RefusedError) -> RefusedError:
        self.on_refused(claim.request_class, refusal.reason)
        return refusal

    def _next(self) -> _Turn | None:
        """Return the first entry that is not set aside, or None: it is the one that may try."""
        again = next((turn for turn in self._again if not turn.aside), None)
        return again or self._order.first(lambda turn: not turn.aside)

    async def _stand(self, turn: _Turn, attempt: Callable[[], Awaitable[T | None]]) -> T:
        """Join the queue, try in turn until there is room, and leave the queue. Raises RefusedError."""
        most = self._join(turn)
        is_served = False
        try:
            async with asyncio.timeout(None if most is None else most.seconds) as limit:
                while turn.refusal is None:
                    await self._wait(turn)
                    if not (turn.aside or self._next() is turn):
                        continue
                    if (admitted := await self._ask(turn, attempt)) is not None:
                        limit.reschedule(None)
                        is_served = True
                        return admitted
            raise self._counted(turn.claim, turn.refusal)
        except TimeoutError:
            if most is None or not limit.expired():
                raise
            raise self._counted(turn.claim, self._refusal(turn, most.reason)) from None
        finally:
            self._leave(turn, is_served)

    def _join(self, turn: _Turn) -> WaitLimit | None:
        """Put a request into the queue, and return how long it may wait there; None if it has no limit."""
        now = time.monotonic()
        self.shedder.rate.set_waiting(True, now)
        if turn.claim.first:
            bisect.insort(self._again, turn, key=lambda other: other.ticket)
            return None
        self._order.add(turn)
        if turn.claim.patient:
            return None
        most = self.shedder.wait_limit(turn.demand, now)
        if most.reason != "timeout":
            turn.late_after = now + most.seconds
        self._refuse_late(turn)
        return most

    def _leave(self, turn: _Turn, is_served: bool) -> None:
        now = time.monotonic()
        if is_served:
            self.shedder.rate.admit(turn.work, now)
        if turn.claim.first:
            self._again.remove(turn)
        elif is_served:
            self._order.serve(turn)
        else:
            self._order.remove(turn)
        self.shedder.rate.set_waiting(bool(self._again or self._order), now)
        self.wake()

    async def _ask(self, turn: _Turn, attempt: Callable[[], Awaitable[T | None]]) -> T | None:
        timer = asyncio.get_running_loop().call_later(ASIDE_SECONDS, self._step_aside, turn)
        turn.asks = True
        try:
            return await attempt()
        finally:
            timer.cancel()
            turn.asks, turn.aside = False, turn.claim.first and turn.claim.is_stranded()
            if turn.aside:
                self.wake()

    def _step_aside(self, turn: _Turn) -> None:
        turn.aside = True
        self.wake()

    async def _wait(self, turn: _Turn) -> None:
        patience: float | None = None
        if turn.aside or self._next() is turn:
            patience = random.uniform(*(IDLE_SECONDS if turn.aside else POLL_SECONDS))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await turn.may_ask.wait()
        turn.may_ask.clear()
