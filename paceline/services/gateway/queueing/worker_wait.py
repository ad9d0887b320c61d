"""Requests that wait until a worker is ready that can begin their work."""

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
    """Lets requests wait until a worker is ready for them.

    A worker may be loading the model, or be about to start. Redis does not know a process yet that still imports its
    libraries, a pod that is being scheduled, or a worker that restarts after a crash. So requests wait whatever the
    reason. They do not wait in the queue, because its forecasts assume workers that run.

    A request is ordinary unless its client is being served already: the request was admitted before, or another choice
    of the same request was.

    Args:
        max_waiting: largest number of ordinary requests that wait here.
        queue_seconds: longest wait of an ordinary request, in seconds. It is longer if a planner starts a worker.
        count_refusal: called with the class of a request that is refused because too many wait, and the reason.
        announce: called when a request begins to wait and no other request does.
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
        """Let all requests that wait here fail with LeavingError, at the next refresh of the fleet at the latest."""
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
        """Wait until a worker is ready, and return the seconds of `queue_seconds` that the request has then used up.

        Args:
            deadline: instant at which the request is given up, on time.monotonic().
            decodes: whether the work needs a decode worker.
            is_ordinary: whether `max_waiting` and `queue_seconds` apply. Other requests wait until their deadlines.
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
        """Wait until the fleet has been read again. Raises UnavailableError at the deadline, or at the instant
        `begin_by` if no planner starts a worker."""
        by = deadline if self._fleet.may_be_empty else min(deadline, begin_by)
        try:
            async with asyncio.timeout(by - time.monotonic()):
                await self._fleet.refreshed()
        except TimeoutError:
            limit = "before the request's deadline" if by == deadline else f"within {self._queue_seconds:g} seconds"
            raise UnavailableError(f"no worker was ready {limit}; try again later") from None
