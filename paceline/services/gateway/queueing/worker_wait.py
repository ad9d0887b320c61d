"""Requests that wait while no worker is ready that could begin their work."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from paceline.core.errors import UnavailableError
from paceline.core.request_classes import DEFAULT
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.http.errors import CountRefusal, LeavingError, NoRoomError


class WorkerWait:
    """The place where requests wait while no worker is ready for them.

    A worker may load the model, or be about to start: a process that imports its libraries, a pod that is scheduled and
    a worker that is started again after a crash are not known to Redis yet. So requests wait whatever the reason. They
    are not in the queue, whose limits are times that a worker which runs already may need.

    A request is ordinary unless its client is being served already: the request was admitted before, or another choice
    of it was.

    Args:
        max_waiting: most ordinary requests that wait here.
        queue_seconds: the longest wait of an ordinary request, unless a planner starts a worker for it.
        count_refusal: called with the class of a request that is refused because too many wait, and the reason.
        announce: called when the first request begins to wait.
    """

    def __init__(
        self,
        fleet: Fleet,
        max_waiting: int,
        queue_seconds: float,
        count_refusal: CountRefusal = lambda request_class, reason: None,
        announce: Callable[[], object] = lambda: None,
    ) -> None:
        self._fleet = fleet
        self._max_waiting = max_waiting
        self._queue_seconds = queue_seconds
        self._waiting = self._ordinary = 0
        self._aborted = False
        self._count_refusal = count_refusal
        self._announce = announce

    def __len__(self) -> int:
        """Return the number of requests that wait here."""
        return self._waiting

    def abort(self) -> None:
        """Let all requests here fail with LeavingError, within the time of a refresh of the fleet."""
        self._aborted = True

    async def until_ready(
        self,
        deadline: float,
        *,
        decodes: bool = True,
        request_class: str = DEFAULT,
        is_ordinary: bool = True,
        waited: float = 0.0,
    ) -> float:
        """Wait until a worker is ready, and return how much of `queue_seconds` the request has used up by then.

        Args:
            deadline: when the request is given up, on time.monotonic().
            decodes: whether the work needs a decode worker.
            is_ordinary: see the class. Another request waits until its deadline, however many wait.
            waited: seconds of `queue_seconds` that the request has used up before.

        Raises:
            RefusedError: too many ordinary requests wait.
            UnavailableError: no worker was ready in time.
            LeavingError: the gateway ends.
        """
        if self._fleet.has_worker(decodes):
            return waited
        if is_ordinary and self._ordinary >= self._max_waiting:
            self._count_refusal(request_class, "queue_full")
            message = "no worker is ready and as many requests as may wait for one do so; try again later"
            raise NoRoomError(message, "queue_full")
        begun = time.monotonic()
        begin_by = begun + self._queue_seconds - waited if is_ordinary else math.inf
        self._waiting += 1
        self._ordinary += is_ordinary
        if self._waiting == 1:
            self._announce()
        try:
            while not self._fleet.has_worker(decodes):
                if self._aborted:
                    raise LeavingError
                await self._refreshed(deadline, begin_by)
        finally:
            self._waiting -= 1
            self._ordinary -= is_ordinary
        return waited if self._fleet.may_be_empty else waited + time.monotonic() - begun

    async def _refreshed(self, deadline: float, begin_by: float) -> None:
        """Wait until the fleet was read again. Raises UnavailableError at the deadline, or at `begin_by` if no planner
        starts a worker."""
        by = deadline if self._fleet.may_be_empty else min(deadline, begin_by)
        try:
            async with asyncio.timeout(by - time.monotonic()):
                await self._fleet.refreshed()
        except TimeoutError:
            limit = "before the request's deadline" if by == deadline else f"within {self._queue_seconds:g} seconds"
            raise UnavailableError(f"no worker was ready {limit}; try again later") from None
