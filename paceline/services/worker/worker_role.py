"""A worker's role, and its change to another role without a restart.

    serves ──change──▶ drains: takes nothing new, gateways move its requests ──▶ serves in the new role

The process, the weights, the mapped arena and the session with kvtransfer stay. The member gets a new epoch, so that
gateways treat it as a new worker, and calls that name an earlier epoch are refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from paceline.core.errors import BusyError, DrainingError, InvalidRequestError, StaleError, UnavailableError
from paceline.services.common.registry import WORKING_ROLES, Role
from paceline.services.common.tasks import end_tasks
from paceline.services.worker.admission import WorkerAdmission

log = logging.getLogger(__name__)


class Changing(Protocol):
    """The part of a worker that a change of its role needs."""

    admission: WorkerAdmission
    failed: asyncio.Future[None]
    """A future that gets an exception if the worker cannot go on."""

    async def take_role(self, role: Role) -> None:
        """Set everything in the worker that depends on its role. The worker must have no running requests."""


class WorkerRole:
    """The role of one worker.

    Args:
        name: the role at the start.
        drain_seconds: the longest time that requests may take to move or end before a change.
        tell: called with False when the worker has begun to drain for a change of role, and with True after the change.
    """

    def __init__(self, name: Role, drain_seconds: float, tell: Callable[[bool], Awaitable[None]]) -> None:
        self.name = name
        self.epoch = time.time_ns()
        """Epoch of the worker's member in its present role."""
        self._drain_seconds = drain_seconds
        self._tell = tell
        self._earlier: set[int] = set()
        """Epochs in which this process had other roles."""
        self._next: tuple[Role, int] | None = None
        """The role and epoch of the change under way."""
        self._changing: asyncio.Task[None] | None = None

    def check(self, epoch: int, role: Role | None = None) -> None:
        """Refuse work that was not meant for this worker in its present role. Raises DrainingError.

        Args:
            epoch: epoch of the member to which the work was sent; 0 if the sender does not say.
            role: the role that the work needs; None if every role but standby will do.
        """
        if epoch in self._earlier:
            raise DrainingError("this worker has another role since")
        if self.name == "standby" or role not in (None, self.name):
            raise DrainingError(f"this worker is no {role or 'working'} worker: its role is {self.name}")

    def change(self, worker: Changing, role: str, epoch: int) -> int:
        """Begin to drain the worker and then to serve in another role. Return the epoch that the member will have.

        Asking for the role that the worker has, or is about to have, changes nothing.

        Args:
            role: the new role.
            epoch: epoch of the member as the caller knows it; 0 for any.

        Raises:
            InvalidRequestError: a worker of text models cannot have this role.
            StaleError: the member has another epoch, so the caller knows an old state.
            BusyError: the worker is about to get another role, or sleeps.
            DrainingError: the worker is ending.
        """
        wanted = next((each for each in WORKING_ROLES if each == role), None)
        if wanted is None:
            raise InvalidRequestError(f"this worker cannot become {role!r}, only {', '.join(WORKING_ROLES)}", "role")
        if epoch not in (0, self.epoch):
            raise StaleError(f"this worker has another epoch than {epoch}: it has got another role, or was restarted")
        if self._next is not None:
            if self._next[0] != wanted:
                raise BusyError(f"this worker is about to become {self._next[0]}; try again after that")
            return self._next[1]
        if worker.admission.draining:
            raise DrainingError("this worker is draining")
        if wanted == self.name:
            return self.epoch
        if worker.admission.asleep:
            raise BusyError("this worker sleeps; wake it before it gets another role")
        self._next = wanted, max(time.time_ns(), self.epoch + 1)
        worker.admission.begin_drain()  # at once, so that nothing happens between the decision and the fence
        self._changing = asyncio.create_task(self._change(worker, *self._next), name="change of role")
        return self._next[1]

    async def announce(self) -> None:
        """Tell the cluster what has changed about the worker."""
        await self._tell(True)

    def renew(self) -> None:
        """Give the member a new epoch in the same role, so that gateways treat it as a new worker."""
        self._earlier.add(self.epoch)
        self.epoch = max(time.time_ns(), self.epoch + 1)

    async def stop(self) -> None:
        """End a change under way, because the worker ends. The worker keeps its old role and refuses new work."""
        if self._changing is not None:
            await end_tasks(self._changing)
        self._next = None

    async def _change(self, worker: Changing, role: Role, epoch: int) -> None:
        log.info("drains to change its role from %s to %s", self.name, role)
        try:
            await self._tell(False)
            if not await worker.admission.drain(self._drain_seconds):
                raise UnavailableError("requests did not end after the time to drain")
            await worker.take_role(role)
            self._earlier.add(self.epoch)
            self.name, self.epoch = role, epoch
            worker.admission.reopen()
            await self._tell(True)
            self._next = None  # later: the next change must not report a drain while this one reports its end
            log.info("serves as %s", role)
        except Exception as error:
            # The worker is fenced and its requests are gone. A new process is the simplest way back to a clean state.
            log.exception("the change of role failed")
            if not worker.failed.done():
                worker.failed.set_exception(UnavailableError(f"the change to {role} failed: {error}"))
