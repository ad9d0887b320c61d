"""The workers of a stack, which may be added and removed while it serves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from paceline.core.errors import ConfigError, PacelineError
from paceline.services.serve.managed_process import ManagedProcess

Role = Literal["prefill", "decode", "encode"]

LEAST: Mapping[Role, int] = {"prefill": 0, "decode": 1, "encode": 0}
"""Smallest number of workers of each role. Without a prefill worker, decode workers compute prompts; without an encode
worker, the workers that compute prompts encode."""
MOST = 64
"""Largest number of workers of one role."""


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    process: ManagedProcess
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """Tasks that must be cancelled before the process is stopped."""


class WorkerFleet:
    """The owner of a stack's workers.

    Args:
        make: makes the process of a worker with this role and name. WorkerFleet starts it.
        supervise: returns a task that starts a worker's process again whenever it ends.
        drain: sends SIGTERM to the worker, which moves or finishes its work, and waits for its end.
        check: raises ConfigError if so many more workers of each role make no sense for the model, or do not fit into
            the machine's memory.
        tell: shows a line to the user.
    """

    def __init__(
        self,
        make: Callable[[Role, str], ManagedProcess],
        supervise: Callable[[ManagedProcess], asyncio.Task[None]],
        drain: Callable[[ManagedProcess], Awaitable[None]],
        check: Callable[[Mapping[Role, int]], None],
        tell: Callable[[str], None],
    ) -> None:
        self._make = make
        self._supervise = supervise
        self._drain = drain
        self._check = check
        self._tell = tell
        # Names are not used again, because a worker that drains still has its own.
        self._numbers: dict[Role, itertools.count[int]] = {role: itertools.count() for role in get_args(Role)}
        self._workers: dict[Role, list[_Worker]] = {role: [] for role in get_args(Role)}
        """Oldest first, without workers that drain."""
        self._draining: dict[Role, set[_Worker]] = {role: set() for role in get_args(Role)}
        self._scaling = asyncio.Lock()
        self._first_are_ready = False

    async def scale(self, targets: Mapping[Role, int]) -> None:
        """Start workers until each role has as many as `targets` says, or drain the newest ones if there are too many.

        Returns as soon as all processes are started and all drains have begun.

        Raises:
            ConfigError: the number of workers is out of range, or the machine has no memory for more.
        """
        for role, count in targets.items():
            if not LEAST[role] <= count <= MOST:
                raise ConfigError(f"{role} must be from {LEAST[role]} to {MOST}, not {count}")
        async with self._scaling:
            added = {role: more for role, count in targets.items() if (more := count - len(self._workers[role])) > 0}
            if added:
                self._check(added)
            for role, count in targets.items():
                for worker in self._workers[role][count:]:
                    self._begin_drain(role, worker)
                while len(self._workers[role]) < count:
                    await self._add(role)

    async def ready(self) -> None:
        """Wait until the workers of the stack's start serve. Raises PacelineError if one does not."""
        await asyncio.gather(*(worker.process.ready() for worker in self._all()))
        self._first_are_ready = True

    def state(self) -> dict[str, dict[str, int]]:
        """Return for each role how many workers are wanted, ready and draining."""
        return {
            role: {
                "wanted": len(workers),
                "ready": sum(worker.process.is_ready for worker in workers),
                "draining": len(self._draining[role]),
            }
            for role, workers in self._workers.items()
        }

    def give_up(self, process: ManagedProcess) -> bool:
        """Forget a worker whose process keeps ending, unless it is the only prefill or decode worker.

        Returns whether the process was a worker's and is forgotten.
        """
        for role, workers in self._workers.items():
            for worker in workers:
                if worker.process is process and (len(workers) > 1 or role == "encode"):
                    workers.remove(worker)
                    return True
        return False

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that have to be cancelled before `stop`."""
        return [task for worker in self._all() for task in worker.tasks]

    async def stop(self, grace: float, hurry: asyncio.Event) -> None:
        """Stop all workers, draining ones too. See `ManagedProcess.stop`."""
        await asyncio.gather(*(worker.process.stop(grace, hurry) for worker in self._all()))

    def _all(self) -> list[_Worker]:
        return [*itertools.chain(*self._workers.values()), *itertools.chain(*self._draining.values())]

    async def _add(self, role: Role) -> None:
        name = f"{role}-{next(self._numbers[role])}"
        worker = _Worker(name, self._make(role, name))
        self._workers[role].append(worker)
        try:
            await worker.process.start()
        except PacelineError:
            self._workers[role].remove(worker)
            raise
        worker.tasks.append(self._supervise(worker.process))
        if self._first_are_ready:
            worker.tasks.append(asyncio.create_task(worker.process.ready_or_stopped()))

    def _begin_drain(self, role: Role, worker: _Worker) -> None:
        self._workers[role].remove(worker)
        self._draining[role].add(worker)
        for task in worker.tasks:
            task.cancel()
        worker.tasks = [asyncio.create_task(self._end(role, worker), name=f"drain {worker.name}")]

    async def _end(self, role: Role, worker: _Worker) -> None:
        self._tell(f"  {worker.name:<12} drains")
        await self._drain(worker.process)
        self._draining[role].discard(worker)
        self._tell(f"  {worker.name:<12} has ended")
