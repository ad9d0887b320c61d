"""Requests that wait until a fleet without ready decode workers has its first one, which loads the model or which a
planner starts for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline.core.errors import UnavailableError
from paceline.services.gateway.errors import LeavingError
from paceline.services.gateway.fleet import Fleet
from paceline.services.gateway.queueing.shedding import RefusedError


class FirstWorker:
    """The place where requests wait while no worker serves that could begin their work.

    They are not in the queue, whose limits are times that a worker which runs already may need.

    Args:
        max_waiting: most requests that wait here.
    """

    def __init__(self, fleet: Fleet, max_waiting: int) -> None:
        self._fleet = fleet
        self._max_waiting = max_waiting
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
        """Return when a worker is ready, or when none is starting and no planner is about to start one.

        Args:
            seconds: the longest wait.
            decodes: whether the work needs a decode worker.
            is_served: whether the client has a part of its answer. Then it waits however many others do.

        Raises:
            RefusedError: too many requests wait.
            UnavailableError: the wait was longer than `seconds`.
            LeavingError: the gateway ends.
        """
        if not self._fleet.awaits_first_worker(decodes):
            return
        if self._waiting >= self._max_waiting and not is_served:
            message = "no worker runs yet and as many requests as may wait for the first one; try again later"
            raise RefusedError(message, "queue_full")
        self._waiting += 1
        if self._waiting == 1:
            self.on_wait()
        try:
            async with asyncio.timeout(seconds):
                while self._fleet.awaits_first_worker(decodes):
                    await self._fleet.refreshed()
                    if self._aborted:
                        raise LeavingError
        except TimeoutError:
            raise UnavailableError(f"no worker has started within {seconds:g} seconds; try again later") from None
        finally:
            self._waiting -= 1
