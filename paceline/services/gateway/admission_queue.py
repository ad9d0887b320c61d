"""The queue of requests for which no worker has room."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from paceline.core.errors import BusyError

POLL_SECONDS = (0.025, 0.1)
"""Seconds between two tries of the request at the head of the queue. A call of this gateway that ends wakes it at once;
it has to poll because calls of other gateways may end, too."""

ASIDE_SECONDS = 0.2
"""Seconds after which the next request in the queue may try although an earlier one still waits for its answer. Most
answers come within milliseconds; they take longer if a prefix is fetched to the worker's host first."""

IDLE_SECONDS = (0.2, 0.6)
"""Seconds between two tries of a patient sequence of the background."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Turn:
    """A request's entry in the queue."""

    place: tuple[bool, int, int]
    """Sort key: False for a request that lost its worker (it comes first), the priority, and a ticket."""
    may_ask: asyncio.Event = field(default_factory=asyncio.Event)
    aside: bool = False
    """Whether the request is trying and later requests do not wait for its answer."""


class AdmissionQueue:
    """A queue in which requests of equal priority are served in the order of their arrival, with two exceptions.

    Requests that lost their worker come before all others.

    A patient entry is a sequence whose client is already being served: a further choice of its request. A request may
    have many choices, so only one patient entry stands in the queue at a time. When it leaves, the next one joins at
    the end. Together they delay the others as much as one more client would. Their priority does not count: all
    patient entries wait for the one in the queue, so a less urgent one there would hold back the others.

    While the queue is empty, new requests try at once, several at a time. So a slow answer delays only the request that
    waits for it. In the queue, requests try one after another; after `ASIDE_SECONDS` without an answer the next one
    tries, too. A request that gets no room keeps its place before later arrivals, however long the answer took.

    Args:
        max_waiting: the most waiting requests, not counting those that lost their worker and patient ones.
        queue_seconds: the longest time in the queue. Patient entries, and requests that lost their worker, have no
            limit here.
    """

    def __init__(self, max_waiting: int, queue_seconds: float) -> None:
        self._max_waiting = max_waiting
        self._queue_seconds = queue_seconds
        self._tickets = itertools.count()
        self._line: list[_Turn] = []
        self._turn_of_patient = asyncio.Lock()
        self.on_wait: Callable[[], object] = lambda: None
        """Called when a request begins to wait."""
        self._waiting = 0
        self._ordinary = 0

    def __len__(self) -> int:
        """Return the number of waiting requests, with the patient ones that have not joined the queue yet."""
        return self._waiting

    @property
    def deferred(self) -> int:
        """Number of patient entries that have not joined the queue, because an earlier one stands in it."""
        return self._waiting - len(self._line)

    async def admit(
        self,
        attempt: Callable[[], Awaitable[T | None]],
        *,
        priority: int = 0,
        first: bool = False,
        patient: bool = False,
        background: bool = False,
    ) -> T:
        """Call `attempt` each time it is this request's turn, until there is room, and return its result.

        Args:
            attempt: a function that tries to admit the request; it returns None if there is no room now.
            priority: the request's priority; lower is more urgent.
            first: whether the request had been admitted and lost its worker; then it waits without a time limit.
            patient: whether the sequence's client is already being served; then it waits without a time limit.
            background: whether nobody waits for the request. Then it is never in the queue: it is refused if others
                wait or if there is no room, and its caller tries again later. A patient one tries until there is room.

        Raises:
            BusyError: the queue is full, `queue_seconds` are over, or no room is idle for the background.
        """
        if background:
            return await self._use_idle_room(attempt, patient)
        ticket = next(self._tickets)
        if not self._waiting and (admitted := await attempt()) is not None:
            return admitted
        ordinary = not (first or patient)
        if ordinary and self._ordinary >= self._max_waiting:
            raise BusyError("the server is busy and its queue is full; try again later")
        self._waiting += 1
        self._ordinary += ordinary
        self.on_wait()
        try:
            async with self._turn_of_patient if patient else contextlib.nullcontext():
                turn = _Turn((not first, 0, next(self._tickets)) if patient else (not first, priority, ticket))
                if not ordinary:
                    # An ordinary request has just tried, or stands after one that has. These two may not have tried.
                    turn.may_ask.set()
                return await self._stand(turn, attempt, self._queue_seconds if ordinary else None)
        finally:
            self._waiting -= 1
            self._ordinary -= ordinary

    async def _use_idle_room(self, attempt: Callable[[], Awaitable[T | None]], patient: bool) -> T:
        while True:
            if not self._waiting and (admitted := await attempt()) is not None:
                return admitted
            if not patient:
                raise BusyError("no worker is idle; work of the background is tried again later")
            await asyncio.sleep(random.uniform(*IDLE_SECONDS))

    def wake(self) -> None:
        """Let the request at the head of the queue try again, because there may be room now."""
        if (turn := self._next()) is not None:
            turn.may_ask.set()

    def _next(self) -> _Turn | None:
        """Return the first entry that is not set aside, or None: it is the one that may try."""
        return next((turn for turn in self._line if not turn.aside), None)

    async def _stand(self, turn: _Turn, attempt: Callable[[], Awaitable[T | None]], seconds: float | None) -> T:
        """Join the queue, try in turn until there is room, and leave the queue.

        Raises BusyError after `seconds`; None waits without a limit.
        """
        bisect.insort(self._line, turn, key=lambda other: other.place)
        try:
            async with asyncio.timeout(seconds) as limit:
                while True:
                    await self._wait(turn)
                    if self._next() is turn and (admitted := await self._ask(turn, attempt)) is not None:
                        limit.reschedule(None)
                        return admitted
        except TimeoutError:
            raise BusyError(
                f"the server is busy: no worker had room within {self._queue_seconds:g} seconds; try again later"
            ) from None
        finally:
            self._line.remove(turn)
            self.wake()

    async def _ask(self, turn: _Turn, attempt: Callable[[], Awaitable[T | None]]) -> T | None:
        timer = asyncio.get_running_loop().call_later(ASIDE_SECONDS, self._step_aside, turn)
        try:
            return await attempt()
        finally:
            timer.cancel()
            turn.aside = False

    def _step_aside(self, turn: _Turn) -> None:
        turn.aside = True
        self.wake()

    async def _wait(self, turn: _Turn) -> None:
        patience = random.uniform(*POLL_SECONDS) if self._next() is turn else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await turn.may_ask.wait()
        turn.may_ask.clear()
