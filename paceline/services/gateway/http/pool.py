"""Threads for work on the bodies of requests, in which every caller has a share."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request

from paceline.services.gateway.http.access.callers import owner_of
from paceline.services.gateway.http.access.turns import OwnerTurns

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


async def aside(request: Request, work: Callable[..., T], *args: object) -> T:
    """Run work for a request on a thread of the gateway's pool and return its result; see `FairPool.run`."""
    pool: FairPool = request.app.state.bodies
    return await pool.run(owner_of(request), work, *args)
