"""The line of requests that found no room."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paceline.core.errors import BusyError

POLL_SECONDS = (0.025, 0.1)
"""How often the first in line asks while none of this gateway's own requests ends; another gateway's may."""

T = TypeVar("T")


class WaitingLine:
    """First come, first served.

    Args:
        max_waiting: places in the line.
        queue_seconds: longest time in it.
    """

    def __init__(self, max_waiting: int, queue_seconds: float) -> None:
        self._max_waiting = max_waiting
        self._queue_seconds = queue_seconds
        self._line: deque[asyncio.Event] = deque()

    def __len__(self) -> int:
        return len(self._line)

    async def admit(
        self, attempt: Callable[[], Awaitable[T | None]], *, first: bool = False, patient: bool = False
    ) -> T:
        """Tries until there is room, in turn.

        Args:
            attempt: returns None where there is no room now.
            first: for a request that had its place already and lost it with its worker; waits before all others.
            patient: for a sequence whose client is being served already; waits behind the others, as long as it takes.

        Raises:
            BusyError: the line is full, or the time is over.
        """
        if not self._line and (admitted := await attempt()) is not None:
            return admitted
        if len(self._line) >= self._max_waiting and not (first or patient):
            raise BusyError("the server is busy and its queue is full; try again later")
        turn = asyncio.Event()
        if first:
            self._line.appendleft(turn)
            turn.set()
        else:
            self._line.append(turn)
        try:
            async with asyncio.timeout(None if patient else self._queue_seconds) as limit:
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

    def wake(self) -> None:
        """Room may have come: the first in line asks again."""
        if self._line:
            self._line[0].set()

    async def _wait(self, turn: asyncio.Event) -> None:
        patience = random.uniform(*POLL_SECONDS) if self._line[0] is turn else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await turn.wait()
        turn.clear()
