"""A worker's admission of requests: the number that run, the queue for blocks, and the end of requests by a drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Literal

from paceline.core.errors import BusyError, DrainingError
from paceline.core.types import Key

ENDING_SECONDS = 5.0
"""Time that requests have to release their blocks after a drain has ended them, in seconds."""


class WorkerAdmission:
    """Counts the requests of one worker, limits their number, and ends them after a drain.

    Args:
        max_requests: the largest number of requests that run at the same time.
    """

    def __init__(self, max_requests: int) -> None:
        self.active = 0
        """Requests that were admitted and have not ended."""
        self.draining = False
        """Whether new requests are refused. `drain` sets it."""
        self.asleep = False
        """Whether new requests are refused, because the worker sleeps or is about to."""
        self._drain_listeners: list[Callable[[], None]] = []
        self._max_requests = max_requests
        self._preempted: dict[Key, bool] = {}
        """For each preempted request, in order of preemption, whether it is of the background."""
        self._deadlines: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._emptied = asyncio.Event()

    @property
    def state(self) -> Literal["ready", "draining", "sleeping"]:
        """The state of the worker's member."""
        return "draining" if self.draining else "sleeping" if self.asleep else "ready"

    @contextlib.asynccontextmanager
    async def admit(self, background: bool = False) -> AsyncIterator[None]:
        """Count one request while the body of the `with` statement runs.

        Args:
            background: whether nobody waits for the request. If so, it comes after all preempted requests.

        Raises:
            BusyError: the worker has no room now, or sleeps.
            DrainingError: the worker is draining, or it began to drain meanwhile and its time for draining is over.
        """
        if self.draining:
            raise _draining()
        if self.asleep:
            raise _asleep()
        first = [key for key, is_background in self._preempted.items() if background >= is_background]
        if first:
            raise BusyError(f"{len(first)} requests that were preempted wait for blocks, and they come first")
        if self.active >= self._max_requests:
            raise BusyError(f"this worker runs {self.active} requests, as many as it may")
        self.active += 1
        try:
            async with self._running():
                yield
        finally:
            self.active -= 1

    @contextlib.asynccontextmanager
    async def join(self, continues: bool) -> AsyncIterator[None]:
        """Count work that does not use a request's place, while the body of the `with` statement runs.

        Args:
            continues: whether the work belongs to a request that was admitted here. Then a draining worker takes it.

        Raises:
            BusyError: the worker sleeps and the work does not continue a request.
            DrainingError: the worker drains and the work does not continue a request, or the time for draining is over.
        """
        if self.draining and not continues:
            raise _draining()
        if self.asleep and not continues:
            raise _asleep()
        async with self._running():
            yield

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        deadline = asyncio.timeout(None)
        self._deadlines.add(deadline)
        self._idle.clear()
        try:
            async with deadline:
                yield
        except TimeoutError:
            if deadline.expired():
                raise _draining() from None
            raise
        finally:
            self._deadlines.remove(deadline)
            if not self._deadlines:
                self._idle.set()
                self._emptied.set()

    async def emptied(self) -> None:
        """Wait until the last running request has ended since the call before. Only one task may wait."""
        await self._emptied.wait()
        self._emptied.clear()

    @contextlib.contextmanager
    def waiting_for_blocks(self, key: Key, background: bool = False) -> Iterator[Callable[[], bool]]:
        """Queue a preempted request for blocks, before newcomers. Yield a function that returns whether it comes next.

        Args:
            background: whether nobody waits for the request. If so, all urgent requests come before it, newcomers too.
        """
        self._preempted[key] = background
        try:
            yield lambda: min(self._preempted, key=self._preempted.__getitem__) == key
        finally:
            del self._preempted[key]

    @property
    def waiting(self) -> int:
        """Number of requests that were preempted and wait for blocks."""
        return len(self._preempted)

    def listen(self, on_draining: Callable[[], None]) -> None:
        """Call `on_draining` from now on each time that the worker begins to drain."""
        self._drain_listeners.append(on_draining)

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        if not self.draining:
            self.draining = True
            for on_draining in self._drain_listeners:
                on_draining()

    async def drain(self, seconds: float) -> bool:
        """Wait up to `seconds` until nothing runs. Then end the remaining requests with DrainingError.

        Returns whether nothing runs any more.
        """
        self.begin_drain()
        if await self.is_idle_within(seconds):
            return True
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            deadline.reschedule(now)
        return await self.is_idle_within(ENDING_SECONDS)

    def reopen(self) -> None:
        """Admit requests again after a drain."""
        self.draining = False

    async def is_idle_within(self, seconds: float) -> bool:
        """Wait up to `seconds` until nothing runs. Return whether nothing runs then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return not self._deadlines


def _draining() -> DrainingError:
    return DrainingError("this worker is draining")


def _asleep() -> BusyError:
    return BusyError("this worker sleeps")
