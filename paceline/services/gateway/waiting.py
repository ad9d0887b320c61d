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

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Turn:
    place: tuple[bool, int]
    """Whether it yields to those who lost their worker, and a ticket."""
    may_ask: asyncio.Event = field(default_factory=asyncio.Event)


class WaitingLine:
    """First come, first served; for two kinds of requests there are rules of their own.

    Those that lost their worker stand before all others, in the order of their coming.

    Those whose clients are being served already, the patient, may be many at once, as one request may ask for many
    choices. So only one of them stands in the line; the next one joins at its end when that one has left. All of them
    together take as much room from the others as one more client would, and each gets its turn.

    While nobody waits, newcomers ask at once, several at a time, so that a slow answer delays only the one that waits
    for it. One that gets no room stands before those that came after it, however long the answer took.

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
        self, attempt: Callable[[], Awaitable[T | None]], *, first: bool = False, patient: bool = False
    ) -> T:
        """Tries until there is room, in turn.

        Args:
            attempt: returns None where there is no room now.
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
                turn = _Turn((not first, next(self._tickets) if patient else ticket))
                if not ordinary:
                    # Others have asked just now, or stand behind somebody who has.
                    turn.may_ask.set()
                return await self._stand(turn, attempt, None if patient else self._queue_seconds)
        finally:
            self._waiting -= 1
            self._ordinary -= ordinary

    def wake(self) -> None:
        """Room may have come: the first in line asks again."""
        if self._line:
            self._line[0].may_ask.set()

    async def _stand(self, turn: _Turn, attempt: Callable[[], Awaitable[T | None]], seconds: float | None) -> T:
        """From joining the line to leaving it."""
        bisect.insort(self._line, turn, key=lambda other: other.place)
        try:
            async with asyncio.timeout(seconds) as limit:
                while True:
                    await self._wait(turn)
                    if self._line[0] is turn and (admitted := await attempt()) is not None:
                        limit.reschedule(None)
                        return admitted
        except TimeoutError:
            raise BusyError(
                f"the server is busy: no worker had room within {self._queue_seconds:g} seconds; try again later"
            ) from None
        finally:
            self._line.remove(turn)
            self.wake()

    async def _wait(self, turn: _Turn) -> None:
        patience = random.uniform(*POLL_SECONDS) if self._line[0] is turn else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await turn.may_ask.wait()
        turn.may_ask.clear()
