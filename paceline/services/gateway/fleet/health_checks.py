"""Health checks of members: of new members, of members that failed, and of members that Redis does not list."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from paceline.core.errors import RefusedError, UntrustedError
from paceline.services.common.rpc import is_serving
from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.fleet.remote_worker import RemoteWorker

FAILED_PROBES = 2
"""Failed health checks in a row after which a member that Redis does not list is dropped."""
_CHECKS = 64
"""Largest number of health checks at a time. When a large fleet joins or falls silent, more would block the gateway."""

log = logging.getLogger(__name__)


class HealthChecks:
    """Sends health checks. Members that fail get no new work; members that have recovered get work again.

    Args:
        on_failure: called before a member that was in use is set aside.
        on_change: called after a member was set aside or is used again.
        on_gone: called with a member that fails health checks and is not listed in Redis.
    """

    def __init__(
        self,
        on_failure: Callable[[RemoteWorker], object],
        on_change: Callable[[RemoteWorker], object],
        on_gone: Callable[[RemoteWorker], object],
    ) -> None:
        self._on_failure, self._on_change, self._on_gone = on_failure, on_change, on_gone
        self._free = asyncio.Semaphore(_CHECKS)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        await end_tasks(*self._tasks)

    def begin(self, worker: RemoteWorker) -> None:
        """Check before the first request whether a new member and this gateway trust each other. Ignore its health."""
        self._spawn(self._is_serving(worker))

    def look(self, worker: RemoteWorker) -> None:
        """Send a health check to a member if one is due, because the member has failed or is not listed."""
        if worker.is_doubtful:
            worker.probe = self._spawn(self._probe(worker))

    def set_aside(self, worker: RemoteWorker) -> None:
        """Give a member no new work until a health check succeeds."""
        if not worker.set_aside:
            self._on_failure(worker)
        worker.set_aside = True
        worker.note_health(False)
        self._on_change(worker)

    async def _probe(self, worker: RemoteWorker) -> None:
        """Send one health check. Depending on the result, use the member again, set it aside, or drop it."""
        try:
            if await self._is_serving(worker):
                worker.is_untrusted = False
                worker.set_aside, worker.failed_probes = False, 0
                worker.note_health(True)
                self._on_change(worker)
                return
        finally:
            worker.probe = None
        if worker.gone:
            return  # another process has taken its name meanwhile
        worker.failed_probes += 1
        if not worker.set_aside:
            log.info("%s does not answer and gets no new requests until it does", worker)
        self.set_aside(worker)
        if worker.failed_probes >= FAILED_PROBES and not worker.listed:
            log.info("%s %s is gone", worker.member.role, worker.member.worker_id)
            self._on_gone(worker)

    async def _is_serving(self, worker: RemoteWorker) -> bool:
        if not worker.is_compatible:
            return False
        try:
            async with self._free:
                return not worker.gone and await is_serving(worker.channel, worker.member.worker_id)
        except RefusedError as error:
            if not worker.refuses_us:
                log.error("%s gets no requests: %s", worker, error)
            worker.refuses_us = True
            self._on_change(worker)
            return False
        except UntrustedError as error:
            if not worker.is_untrusted:
                log.error("%s gets no requests for now: %s", worker, error)
            worker.is_untrusted = True
            self.set_aside(worker)
            return False

    def _spawn(self, check: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(check)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
