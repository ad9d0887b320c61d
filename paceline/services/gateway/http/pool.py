"""Threads for work on the bodies of requests, in which every caller has a share."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request

from paceline.services.gateway.access.callers import owner_of

T = TypeVar("T")

LEAST_THREADS, MOST_THREADS = 2, 8
"""More threads would only wait for the interpreter, except while they tokenize."""


class FairPool:
    """A pool of threads. Callers take turns, and no caller has all threads.

    Args:
        threads: at least 2.
    """

    def __init__(self, threads: int = min(MOST_THREADS, max(LEAST_THREADS, os.cpu_count() or 1))) -> None:
        self._executor = ThreadPoolExecutor(threads, "body")
        self._threads = threads
        self._running: Counter[str] = Counter()
        """Threads that each caller has, by owner."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The turns for which callers wait, by owner. The first owner is next."""

    async def run(self, owner: str, work: Callable[..., T], *args: object) -> T:
        """Run `work` on a thread and return its result, after other callers had their turns.

        Raises the errors of `work`. If the call is cancelled, work that has begun goes on.
        """
        loop = asyncio.get_running_loop()
        if not self._may_run(owner):
            await self._turn(owner)
        else:
            self._running[owner] += 1
        begun = self._executor.submit(contextvars.copy_context().run, work, *args)
        begun.add_done_callback(lambda _: loop.call_soon_threadsafe(self._end, owner))
        try:
            return await asyncio.wrap_future(begun)
        finally:
            del begun  # it has the error, whose traceback has this frame: a cycle that only a collection would free

    async def close(self) -> None:
        """Wait until all work has ended."""
        await asyncio.to_thread(self._executor.shutdown)

    def _may_run(self, owner: str) -> bool:
        return self._running.total() < self._threads and self._running[owner] < self._threads - 1

    async def _turn(self, owner: str) -> None:
        """Wait until a caller has a thread."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(owner)  # the turn came just now
            raise

    def _end(self, owner: str) -> None:
        """Take a thread back from a caller, and give threads to those who wait."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        for each in list(self._waiting):
            turns = self._waiting[each]
            while turns and turns[0].done():
                turns.popleft()  # its caller waits no longer
            if turns and self._may_run(each):
                self._running[each] += 1
                turns.popleft().set_result(None)
                self._waiting[each] = self._waiting.pop(each)  # the others are next
            if not turns:
                del self._waiting[each]


async def aside(request: Request, work: Callable[..., T], *args: object) -> T:
    """Run work for a request on a thread of the gateway's pool and return its result; see `FairPool.run`."""
    pool: FairPool = request.app.state.bodies
    return await pool.run(owner_of(request), work, *args)
