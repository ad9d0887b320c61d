"""Threads for work on the bodies of requests. Callers take turns, so that no caller takes all of a few places."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

WAITING_THREADS, MOST_THREADS = 4, 16
"""Threads beside one for each core, because a thread waits while a long text is tokenized; and the most threads."""


class FairPool:
    """A pool of threads, at which callers take turns.

    Args:
        threads: if there are several, no owner ever has all of them.
        name: begin of the threads' names.
    """

    def __init__(
        self, threads: int = min(MOST_THREADS, WAITING_THREADS + (os.cpu_count() or 1)), name: str = "body"
    ) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._turns = OwnerTurns(threads)

    async def run(self, owner: str, work: Callable[..., T], *args: object) -> T:
        """Run `work` on a thread and return its result, after other callers had their turns.

        Raises the errors of `work`. If the call is cancelled, work that has begun goes on.
        """
        loop = asyncio.get_running_loop()
        await self._turns.take(owner)
        begun = self._executor.submit(contextvars.copy_context().run, work, *args)
        begun.add_done_callback(lambda _: loop.call_soon_threadsafe(self._turns.give_back, owner))
        try:
            return await asyncio.wrap_future(begun)
        finally:
            del begun  # it has the error, whose traceback has this frame: a cycle that only a collection would free

    def close(self, last: Callable[[], object] = lambda: None) -> None:
        """Do `last` after all work that has begun, and wait until it is done."""
        self._executor.submit(last)
        self._executor.shutdown()


class OwnerTurns:
    """A few places. If owners wait for one, a free place goes to each of them in turn.

    One owner never has all places if there are several. Callers without a key are the owner "". They may have all,
    because nobody else calls a gateway that asks for no key.

    Args:
        count: the number of places.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: Counter[str] = Counter()
        """Places that each owner has."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Those who wait, by owner. The first owner's turn is next."""

    def waiting(self, owner: str) -> int:
        """Return how many of an owner's turns have not come yet."""
        return sum(not turn.done() for turn in self._waiting.get(owner, ()))

    async def take(self, owner: str) -> None:
        """Take a place, after other owners had their turns. If this is cancelled, no place is taken."""
        if self._has_place(owner):
            self._taken[owner] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(owner)  # the turn came just now
            raise

    def give_back(self, owner: str) -> None:
        """Give a place back, and free places to those whose turn it is."""
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        for each in list(self._waiting):
            turns = self._waiting[each]
            while turns and turns[0].done():
                turns.popleft()  # it waits no longer
            if turns and self._has_place(each):
                self._taken[each] += 1
                turns.popleft().set_result(None)
                self._waiting[each] = self._waiting.pop(each)  # the others are next
            if not turns:
                del self._waiting[each]

    def _has_place(self, owner: str) -> bool:
        most = max(1, self._count - 1) if owner else self._count
        return self._taken.total() < self._count and self._taken[owner] < most
