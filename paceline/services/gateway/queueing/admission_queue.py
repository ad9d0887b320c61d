"""The queue of requests for which no worker has room."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from paceline.services.gateway.http.errors import CountRefusal, NoRoomError
from paceline.services.gateway.queueing.fair_order import ORDINARY, QueueClaim, next_ticket
from paceline.services.gateway.queueing.queue_state import HELD, Held, QueueState, Turn
from paceline.services.gateway.queueing.shedding import LoadShedder

POLL_SECONDS = (0.025, 0.1)
"""Shortest and longest interval between two tries of the request at the head of the queue, in seconds. The end of a
call of this gateway wakes the request at once. It also polls, because calls of other gateways may end, too."""

ASIDE_SECONDS = 0.2
"""Seconds after which the next request in the queue may try although an earlier one still waits for its answer. Most
answers come within milliseconds; they take longer if a prefix is fetched to the worker's host first."""

IDLE_SECONDS = (0.2, 0.6)
"""Shortest and longest interval between two tries of a patient background sequence, or of a request that stands aside,
in seconds."""

T = TypeVar("T")

Attempt = Callable[[], Awaitable[T | Held | None]]
"""A function that tries to admit a request. It returns None if no worker has room, and HELD if the request should wait
although a worker has room."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Turn(Turn):
    """A request's entry in the queue, which waits until it may try."""

    may_ask: asyncio.Event = field(default_factory=asyncio.Event)


class AdmissionQueue:
    """A queue in which requests are served by priority. API keys of equal priority share the workers by their weights.

    `QueueState` decides which request is next and which one is refused. This class does the waiting.

    A patient entry is a sequence whose client is already being served: a further choice of its request. A request may
    have many choices, so only one patient entry stands in the queue at a time. When it leaves, the next patient entry
    joins at the end of the queue. So all patient entries together delay other requests as much as one more client
    would. Their priorities do not count: all patient entries wait for the one in the queue, so a less urgent one there
    would hold back the others.

    While the queue is empty, new requests try at once, several at a time. So a worker's slow answer delays only the
    request that waits for it. In the queue, requests try one after another; if a worker has not answered a try after
    `ASIDE_SECONDS`, the next request tries, too. A request that gets no room keeps its place before later arrivals,
    however long the answer took. If it is held back although there is room, shorter prompts may try before it.

    Args:
        max_waiting: largest number of waiting requests. Requests that lost their worker and patient ones do not count.
        queue_seconds: longest wait in the queue, in seconds. Patient entries, and requests that lost their worker, have
            no limit here.
        count_refusal: called with the class of a request that is refused, and the reason.
    """

    def __init__(
        self,
        max_waiting: int,
        queue_seconds: float,
        count_refusal: CountRefusal = lambda request_class, reason: None,
    ) -> None:
        self._count_refusal = count_refusal
        self._listeners: list[Callable[[], object]] = []
        self._state: QueueState[_Turn] = QueueState(max_waiting, queue_seconds, lambda turn: turn.may_ask.set())
        self._turn_of_patient = asyncio.Lock()
        self._poll: asyncio.TimerHandle | None = None
        """Timer that wakes the head of the queue if all waiting requests are held back; None if no timer runs."""
        self._waiting = 0

    @property
    def shedder(self) -> LoadShedder:
        return self._state.shedder

    def __len__(self) -> int:
        """Return the number of waiting requests, including patient entries that have not joined the queue yet."""
        return self._waiting

    @property
    def deferred(self) -> int:
        """Number of patient entries that have not joined the queue, because an earlier patient entry stands in it."""
        return self._waiting - len(self._state)

    def call_on_wait(self, listener: Callable[[], object]) -> None:
        """Register a function that is called each time a request begins to wait."""
        self._listeners.append(listener)

    def count(self, fits: Callable[[QueueClaim], bool]) -> int:
        """Return the number of requests in the queue for which `fits` is true."""
        return sum(fits(turn.claim) for turn in self._state)

    async def admit(self, attempt: Attempt[T], claim: QueueClaim = ORDINARY) -> T:
        """Call `attempt` each time it is this request's turn, until the request is admitted, and return the result.

        Raises:
            RefusedError: the request would wait too long, has waited too long, or lost its place to more urgent ones;
                or it is a background request and no worker has idle room.
        """
        if claim.background:
            return await self._use_idle_room(attempt, claim)
        priority = 0 if claim.patient else claim.priority
        turn = _Turn(owner=claim.owner, weight=claim.weight, priority=priority, claim=claim)
        result = None if self._waiting else await attempt()
        if result is not None and result is not HELD:
            return result
        turn.demand = claim.measure()
        turn.work = turn.demand.work
        if result is HELD:
            self._hold(turn)
        elif self._state.passes_all(turn) and (admitted := await self._try(turn, attempt)) is not None:
            return admitted
        if claim.is_ordinary:
            self._let_in(turn)
        self._waiting += 1
        for listener in self._listeners:
            listener()
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

    def wake(self) -> None:
        """Let the request at the head of the queue try again, because there may be room now."""
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None
        self._state.release()
        if (turn := self._state.next()) is not None:
            turn.may_ask.set()

    async def _use_idle_room(self, attempt: Attempt[T], claim: QueueClaim) -> T:
        while True:
            result = None if self._waiting else await attempt()
            if result is not None and result is not HELD:
                return result
            if not claim.patient:
                message = "no worker is idle; work of the background is tried again later"
                raise self._counted(claim, NoRoomError(message, "background"))
            await asyncio.sleep(random.uniform(*IDLE_SECONDS))

    def _let_in(self, turn: _Turn) -> None:
        """Raise RefusedError if a request must not wait."""
        try:
            self._state.let_in(turn, time.monotonic())
        except NoRoomError as refusal:
            raise self._counted(turn.claim, refusal) from None

    def _counted(self, claim: QueueClaim, refusal: NoRoomError) -> NoRoomError:
        self._count_refusal(claim.request_class, refusal.reason)
        return refusal

    async def _stand(self, turn: _Turn, attempt: Attempt[T]) -> T:
        """Join the queue, try in turn until the request is admitted, and leave the queue. Raises RefusedError."""
        most = self._state.join(turn, time.monotonic())
        is_served = False
        try:
            async with asyncio.timeout(None if most is None else most.seconds) as limit:
                while turn.refusal is None:
                    await self._wait(turn)
                    if not (turn.aside or self._state.next() is turn):
                        continue
                    if (admitted := await self._ask(turn, attempt)) is not None:
                        limit.reschedule(None)
                        is_served = True
                        return admitted
            raise self._counted(turn.claim, turn.refusal)
        except TimeoutError:
            if most is None or not limit.expired():
                raise
            raise self._counted(turn.claim, self._state.refusal(turn, most.reason, time.monotonic())) from None
        finally:
            turn.refusal = None  # its traceback has this frame
            self._state.leave(turn, time.monotonic(), is_served=is_served)
            self.wake()

    async def _try(self, turn: _Turn, attempt: Attempt[T]) -> T | None:
        """Call `attempt` and return its result. If the request is held back, let shorter ones try, and return None."""
        result = await attempt()
        if result is not HELD:
            return result
        self._hold(turn)
        return None

    def _hold(self, turn: _Turn) -> None:
        """Note that a request is held back. Let the first shorter request try; if there is none, let all try soon."""
        if (shorter := self._state.hold(turn)) is not None:
            shorter.may_ask.set()
        elif self._poll is None:
            self._poll = asyncio.get_running_loop().call_later(random.uniform(*POLL_SECONDS), self.wake)

    async def _ask(self, turn: _Turn, attempt: Attempt[T]) -> T | None:
        self._state.begin_try(turn)
        timer = asyncio.get_running_loop().call_later(ASIDE_SECONDS, self._step_aside, turn)
        turn.asks = True
        try:
            return await self._try(turn, attempt)
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
        if turn.aside or self._state.next() is turn:
            patience = random.uniform(*(IDLE_SECONDS if turn.aside else POLL_SECONDS))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await turn.may_ask.wait()
        turn.may_ask.clear()
