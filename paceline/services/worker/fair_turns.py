"""A lock for which owners take turns, however many turns each of them waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class FairTurns:
    """Gives one turn at a time. Owners that wait are served in rotation, and the turns of one owner in order."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Turns that each owner waits for. The first owner is served next."""

    @property
    def waiting(self) -> int:
        """Number of turns that are waited for."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for a turn of this owner. It lasts for the body of the `with` statement."""
        if self._is_taken:
            await self._wait(owner)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, owner: str) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # the turn came together with the cancellation
                self._pass_on()
            else:
                self._waiting[owner].remove(mine)
                if not self._waiting[owner]:
                    del self._waiting[owner]
            raise

    def _pass_on(self) -> None:
        self._is_taken = bool(self._waiting)
        if self._is_taken:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turns.popleft().set_result(None)
            if turns:
                self._waiting[owner] = turns
