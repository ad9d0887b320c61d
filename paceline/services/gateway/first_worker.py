"""Requests that wait while no worker is ready that could begin their work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from paceline.core.errors import UnavailableError
from paceline.services.gateway.errors import LeavingError
from paceline.services.gateway.fleet import Fleet
from paceline.services.gateway.queueing.shedding import RefusedError


class FirstWorker:
    """The place where requests wait while no worker is ready for them.

    A worker may load the model, or be about to start: a process that imports its libraries, a pod that is scheduled and
    a worker that is started again after a crash are not known to Redis yet. So requests wait whatever the reason. They
    are not in the queue, whose limits are times that a worker which runs already may need.

    Args:
        max_waiting: most requests that wait here.
        queue_seconds: the longest wait of a request that no worker has begun.
    """

    def __init__(self, fleet: Fleet, max_waiting: int, queue_seconds: float) -> None:
        self._fleet = fleet
        self._max_waiting = max_waiting
        self._queue_seconds = queue_seconds
        self._waiting = 0
        self._aborted = False
        self.on_wait: Callable[[], object] = lambda: None
        """Called when the first request begins to wait."""

    def __len__(self) -> int:
        """Return the number of requests that wait here."""
        return self._waiting

    def abort(self) -> None:
        """Let all requests here fail with LeavingError, within the time of a refresh of the fleet."""
        self._aborted = True

    async def wait(self, seconds: float, decodes: bool = True, is_served: bool = False) -> None:
        """Return when a worker is ready.

        Args:
            seconds: the longest wait if the client has a part of its answer, or if a planner starts a worker for the
                request. Otherwise the wait also ends after `queue_seconds`.
            decodes: whether the work needs a decode worker.
            is_served: whether the client has a part of its answer. Then it waits however many others do.

        Raises:
            RefusedError: too many requests wait.
            UnavailableError: no worker was ready in time.
            LeavingError: the gateway ends.
        """
        if self._fleet.has_worker(decodes):
            return
        if self._waiting >= self._max_waiting and not is_served:
            message = "no worker is ready and as many requests as may wait for one do so; try again later"
            raise RefusedError(message, "queue_full")
        self._waiting += 1
        if self._waiting == 1:
            self.on_wait()
        begun = time.monotonic()
        try:
            while not self._fleet.has_worker(decodes):
                if self._aborted:
                    raise LeavingError
                is_patient = is_served or self._fleet.may_be_empty
                most = seconds if is_patient else min(seconds, self._queue_seconds)
                try:
                    async with asyncio.timeout(begun + most - time.monotonic()):
                        await self._fleet.refreshed()
                except TimeoutError:
                    message = f"no worker was ready within {most:.3g} seconds; try again later"
                    raise UnavailableError(message) from None
        finally:
            self._waiting -= 1
