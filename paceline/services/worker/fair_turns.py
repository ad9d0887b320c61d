"""A lock that owners get in rotation, however many turns each of them waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from paceline.core.errors import UnavailableError


class AbandonedError(UnavailableError):
    """The error of work that was given up, because nobody waits for its result any more."""

    def __init__(self) -> None:
        super().__init__("nobody waits for this work any more")


class FairTurns:
    """Gives one turn at a time. Owners that wait are served in rotation, and the turns of one owner in order."""

    def __init__(self) -> None:
        self.is_taken = False
        """Whether somebody has the turn, or is about to get it."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The waiting turns of each owner. The first owner is served next."""

    @property
    def waiting(self) -> int:
        """Number of callers that wait for a turn."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def turn(self, owner: str, abandoned: asyncio.Event) -> AsyncIterator[None]:
        """Wait for a turn of this owner. The turn lasts for the body of the `with` statement.

        Raises:
            AbandonedError: `abandoned` was set before the turn came.
        """
        if self.is_taken:
            await self._wait(owner, abandoned)
        self.is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, owner: str, abandoned: asyncio.Event) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(mine)
        leaving = asyncio.create_task(abandoned.wait())
        try:
            # A cancellation of this task does not cancel `mine`, so `_pass_on` can always set its result.
            await asyncio.wait((mine, leaving), return_when=asyncio.FIRST_COMPLETED)
            if abandoned.is_set():
                raise AbandonedError
        except BaseException:
            self._leave(owner, mine)
            raise
        finally:
            leaving.cancel()

    def _leave(self, owner: str, mine: asyncio.Future[None]) -> None:
        """Give up a turn, whether it has come or is still awaited."""
        if mine.done():
            self._pass_on()
            return
        self._waiting[owner].remove(mine)
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _pass_on(self) -> None:
        self.is_taken = bool(self._waiting)
        if self.is_taken:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turns.popleft().set_result(None)
            if turns:
                self._waiting[owner] = turns
