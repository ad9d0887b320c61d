"""The line of requests that found no room."""

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
"""How often the first in line asks while none of this gateway's own calls ends; another gateway's may."""

ASIDE_SECONDS = 0.2
"""Who has waited so long for an answer lets the next one ask, too. Most come within milliseconds; not where a prefix is
brought to the worker first."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Turn:
    place: tuple[bool, int, int]
    """Whether it yields to those who lost their worker, its priority, and a ticket."""
    may_ask: asyncio.Event = field(default_factory=asyncio.Event)
    aside: bool = False
    """It asks, and others do not wait for the answer."""


class AdmissionQueue:
    """First come, first served among the equally urgent; for two kinds of requests there are rules of their own.

    Those that lost their worker stand before all others.

    Those whose clients are being served already, the patient, may be many at once, as one request may ask for many
    choices. So only one of them stands in the line; the next one joins at its end when that one has left. All of them
    together take as much room from the others as one more client would. Their priority does not count, or one that is
    not urgent would keep those behind it from their turn.

    While nobody waits, newcomers ask at once, several at a time, so that a slow answer delays only the one that waits
    for it. In the line one asks after the other, but a slow answer is not waited for by those behind. One that gets no
    room stands before those that came after it, however long the answer took.

    Args:
        max_waiting: places for requests of neither kind.
        queue_seconds: longest time in the line, but for the patient.
    """

    def __init__(self, max_waiting: int, queue_seconds: float) -> None:
        self._max_waiting = max_waiting
        self._queue_seconds = queue_seconds
        self._tickets = itertools.count()
        self._line: list[_Turn] = []
        self._turn_of_patient = asyncio.Lock()
        self._waiting = 0
        self._ordinary = 0

    def __len__(self) -> int:
        """All that wait, the patient beside the line too."""
        return self._waiting

    async def admit(
        self,
        attempt: Callable[[], Awaitable[T | None]],
        *,
        priority: int = 0,
        first: bool = False,
        patient: bool = False,
    ) -> T:
        """Tries until there is room, in turn.

        Args:
            attempt: returns None where there is no room now.
            priority: a lower one is more urgent.
            first: for a request that had its place already and lost it with its worker.
            patient: for a sequence whose client is being served already; waits as long as it takes.

        Raises:
            BusyError: the line is full, or the time is over.
        """
        ticket = next(self._tickets)
        if not self._waiting and (admitted := await attempt()) is not None:
            return admitted
        ordinary = not (first or patient)
        if ordinary and self._ordinary >= self._max_waiting:
            raise BusyError("the server is busy and its queue is full; try again later")
        self._waiting += 1
        self._ordinary += ordinary
        try:
            async with self._turn_of_patient if patient else contextlib.nullcontext():
                turn = _Turn((not first, 0, next(self._tickets)) if patient else (not first, priority, ticket))
                if not ordinary:
                    # Others have asked just now, or stand behind somebody who has.
                    turn.may_ask.set()
                return await self._stand(turn, attempt, None if patient else self._queue_seconds)
        finally:
            self._waiting -= 1
            self._ordinary -= ordinary

    def wake(self) -> None:
        """Room may have come: the first in line asks again."""
        if (turn := self._next()) is not None:
            turn.may_ask.set()

    def _next(self) -> _Turn | None:
        """Whose turn it is to ask."""
        return next((turn for turn in self._line if not turn.aside), None)

    async def _stand(self, turn: _Turn, attempt: Callable[[], Awaitable[T | None]], seconds: float | None) -> T:
        """From joining the line to leaving it."""
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
