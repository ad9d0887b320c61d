"""A few places that owners take in turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

from paceline.core.errors import BusyError

MAX_WAITING = 64
"""Most requests of one owner that wait for a place; further ones get 429."""


class Places:
    """Places for work that takes long. If owners wait, a free place goes to each of them in turn.

    One owner never has all places, if there are several.

    Args:
        count: the number of places.
        seconds: the longest wait for a place.
    """

    def __init__(self, count: int, seconds: float) -> None:
        self._free = count
        self._most = max(1, count - 1)
        self._seconds = seconds
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Those who wait, by owner. The first owner's turn is next."""

    @contextlib.asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Wait for a place. Raises BusyError if too many of the owner's requests wait, or if none is free in time."""
        line = self._waiting.setdefault(owner, deque())
        if len(line) >= MAX_WAITING:
            raise BusyError("too many new constraints of this key wait to be compiled; try again later")
        turn = asyncio.get_running_loop().create_future()
        line.append(turn)
        self._give()
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    await turn
            except TimeoutError:
                raise BusyError("other constraints are being compiled; try again later") from None
            yield
        finally:
            if not turn.cancelled():  # it was this request's turn
                self._free += 1
                self._taken[owner] -= 1
            self._give()

    def _give(self) -> None:
        """Give free places to those whose turn it is."""
        for owner in [*self._waiting]:
            line = self._waiting[owner]
            while line and line[0].done():
                line.popleft()
            if not line:
                del self._waiting[owner]
            elif self._free and self._taken[owner] < self._most:
                self._free -= 1
                self._taken[owner] += 1
                line.popleft().set_result(None)
                self._waiting[owner] = self._waiting.pop(owner)  # to the end
        self._taken += Counter()  # without those who have none
