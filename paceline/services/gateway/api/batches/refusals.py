"""The lines of one batch that the limits of its key refuse."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque


class RefusedLines:
    """Lines that wait until their key may use more.

    Each is tried again after the time that its refusal names, or earlier if another line of the batch has ended: that
    may have made room below the largest number of requests at a time. While a line waits, no further one should be
    read, because it would only be refused, too.
    """

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        """Lines that were refused when they were last tried."""
        self._turns: deque[asyncio.Future[None]] = deque()
        self._none = asyncio.Event()
        self._none.set()

    async def wait(self, number: int, seconds: float) -> None:
        """Wait until a line that was refused may be tried again.

        Args:
            seconds: time that the refusal names.
        """
        self._numbers.add(number)
        self._none.clear()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds * random.uniform(1.0, 1.5)):
                    await turn
        finally:
            if turn in self._turns:
                self._turns.remove(turn)

    def note_end(self, number: int) -> None:
        """Note that a line was tried and not refused."""
        self._numbers.discard(number)
        if not self._numbers:
            self._none.set()
        while self._turns:
            if not (turn := self._turns.popleft()).done():
                turn.set_result(None)
                return

    async def wait_for_none(self) -> None:
        """Wait until no line waits."""
        await self._none.wait()
