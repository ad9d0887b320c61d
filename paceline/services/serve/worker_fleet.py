"""The workers of a stack, which may be added and removed while it serves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from paceline.core.errors import ConfigError, PacelineError
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import open_channel
from paceline.services.common.set_role import set_role
from paceline.services.serve.managed_process import ManagedProcess

Role = Literal["prefill", "decode", "encode", "pool"]

MOST = 64
"""Largest number of workers of one role."""
LOOK_SECONDS = 0.2
"""Interval of the checks whether a worker may drain, in seconds."""
FLIPPING: tuple[Role, ...] = ("prefill", "decode")
"""Roles between which a running worker can change."""


@dataclass(slots=True, eq=False)
class ServedWorker:
    """A worker of the stack. Its name stays when its role changes."""

    name: str
    role: Role
    process: ManagedProcess = field(init=False)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """Tasks that must be cancelled before the process is stopped."""
    waits: bool = False
    """Whether the worker is to drain, but serves until another worker of its role is ready."""


class WorkerFleet:
    """The owner of a stack's workers.

    Args:
        make: makes the process of a worker, which takes the worker's role at each start. WorkerFleet starts it.
        supervise: returns a task that starts a worker's process again whenever it ends.
        drain: sends SIGTERM to the worker, which moves or finishes its work, and waits for its end.
        flip: tells a running worker to take another role. Raises PacelineError if the worker refuses.
        check: raises ConfigError if the model has no use for so many more workers of each role, or the machine has no
            memory for them.
        tell: shows a line to the user.
        roles: the roles that workers of the model may have.
    """

    def __init__(
        self,
        make: Callable[[ServedWorker], ManagedProcess],
        supervise: Callable[[ManagedProcess], asyncio.Task[None]],
        drain: Callable[[ManagedProcess], Awaitable[None]],
        flip: Callable[[ServedWorker, Role], Awaitable[None]],
        check: Callable[[Mapping[Role, int]], None],
        tell: Callable[[str], None],
        roles: Sequence[Role],
    ) -> None:
        self._make = make
        self._supervise = supervise
        self._drain = drain
        self._flip = flip
        self._check = check
        self._tell = tell
        self._roles = roles
        # Names are not used again, because a worker that drains still has its own.
        self._numbers: dict[Role, itertools.count[int]] = {role: itertools.count() for role in get_args(Role)}
        self._workers: dict[Role, list[ServedWorker]] = {role: [] for role in get_args(Role)}
        """The workers of each role, oldest first, without workers that drain."""
        self._draining: dict[Role, set[ServedWorker]] = {role: set() for role in get_args(Role)}
        self._given_up: dict[Role, int] = dict.fromkeys(get_args(Role), 0)
        self._scaling = asyncio.Lock()
        self._first_are_ready = False

    async def scale(self, targets: Mapping[Role, int], victims: Sequence[str] = ()) -> None:
        """Start workers until each role has as many as `targets` says, or drain some if there are too many.

        Returns as soon as all processes are started and all drains have begun.

        Args:
            victims: names of the workers to drain, in this order. Workers that do not serve yet are drained before
                them, and the newest workers after them. Names of workers that have ended are ignored.

        Raises:
            ConfigError: the number of workers is out of range, or the machine has no memory for more.
        """
        for role, count in targets.items():
            if not 0 <= count <= MOST:
                raise ConfigError(f"{role} must be from 0 to {MOST}, not {count}")
        async with self._scaling:
            added = {role: more for role, count in targets.items() if (more := count - len(self._workers[role])) > 0}
            if added:
                self._check(added)
            for role, count in targets.items():
                for worker in self._order(role, victims)[count:]:
                    self._begin_drain(worker)
                while len(self._workers[role]) < count:
                    await self._add(role)

    async def drain(self, names: Sequence[str]) -> None:
        """Drain workers. Their roles have fewer workers from now on. Raises ConfigError if one is unknown.

        If a role's only serving worker is drained while another one is starting, it serves until the other one is
        ready.
        """
        async with self._scaling:
            for worker in [self._find(name) for name in names]:
                self._begin_drain(worker)

    async def flip(self, roles: Mapping[str, Role]) -> None:
        """Give running workers other roles. A worker that has its role already is left alone.

        Returns when the workers have begun to drain for the change.

        Args:
            roles: the new role of each worker, by its name.

        Raises:
            ConfigError: a worker is unknown or cannot take the role, no decode worker would stay one, or the workers
                that stay in a role do not serve yet.
            PacelineError: a worker refuses, or does not answer.
        """
        async with self._scaling:
            changes = [(worker, role) for name, role in roles.items() if (worker := self._find(name)).role != role]
            for worker, role in changes:
                if not {worker.role, role} <= {*FLIPPING}.intersection(self._roles):
                    raise ConfigError(f"{worker.name} is {worker.role} and cannot become {role}: start a new worker")
                if not worker.process.is_ready:
                    raise ConfigError(f"{worker.name} does not serve yet; try again when it is ready")
            for role in FLIPPING:
                leaving = [worker for worker, _ in changes if worker.role == role]
                stay = [worker for worker in self._workers[role] if worker not in leaving]
                if leaving and not stay and role == "decode":
                    raise ConfigError("no decode worker would be left during the change; add one first")
                if leaving and stay and not any(worker.process.is_ready for worker in stay):
                    raise ConfigError(f"{stay[0].name} does not serve yet; try again when it is ready")
            for worker, role in changes:
                await self._flip(worker, role)
                if worker not in self._workers[worker.role]:
                    raise ConfigError(f"{worker.name} was given up meanwhile, because its process keeps ending")
                self._workers[worker.role].remove(worker)
                self._workers[role].append(worker)
                worker.role = role
                self._tell(f"  {worker.name:<12} becomes {role}")

    async def ready(self) -> None:
        """Wait until the workers that were started with the stack serve. Raises PacelineError if one does not serve."""
        await asyncio.gather(*(worker.process.ready() for worker in self._all()))
        self._first_are_ready = True

    def state(self) -> dict[str, dict[str, int]]:
        """Return, for each role that workers may have, the numbers of wanted, ready and draining workers, and of those
        that were given up so far.
        """
        return {
            role: {
                "wanted": len(workers),
                "ready": sum(worker.process.is_ready for worker in workers),
                "draining": len(self._draining[role]),
                "given_up": self._given_up[role],
            }
            for role, workers in self._workers.items()
            if role in self._roles
        }

    def give_up(self, process: ManagedProcess) -> bool:
        """Forget a worker whose process keeps ending, unless it is the only prefill, decode or pool worker.

        If this worker was to replace one that waits to drain, the waiting worker does not drain.

        Returns whether the process was a worker's and is forgotten.
        """
        worker = next((each for each in itertools.chain(*self._workers.values()) if each.process is process), None)
        if worker is None:
            return False
        role, workers = worker.role, self._workers[worker.role]
        if len(workers) == 1:
            if (waiting := next((each for each in self._draining[role] if each.waits), None)) is not None:
                self._stay(waiting)
            elif role != "encode":
                return False
        workers.remove(worker)
        self._given_up[role] += 1
        return True

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that have to be cancelled before `stop`."""
        return [task for worker in self._all() for task in worker.tasks]

    async def stop(self, grace: float, hurry: asyncio.Event) -> None:
        """Stop all workers, draining ones too. The arguments are those of `ManagedProcess.stop`."""
        await asyncio.gather(*(worker.process.stop(grace, hurry) for worker in self._all()))

    def _find(self, name: str) -> ServedWorker:
        """Return the worker with this name. Raises ConfigError if no worker has this name, or if the worker drains."""
        workers = itertools.chain(*self._workers.values())
        if (found := next((worker for worker in workers if worker.name == name), None)) is None:
            raise ConfigError(f"there is no worker {name}, or it drains already; GET /fleet names all workers")
        return found

    def _order(self, role: Role, victims: Sequence[str]) -> list[ServedWorker]:
        """Return the workers of a role. The worker that is drained first comes last."""
        places = {name: place for place, name in enumerate(victims)}

        def place(worker: ServedWorker) -> tuple[bool, int]:
            return not worker.process.is_ready, -places.get(worker.name, len(places))

        return sorted(self._workers[role], key=place)

    def _all(self) -> list[ServedWorker]:
        return [*itertools.chain(*self._workers.values()), *itertools.chain(*self._draining.values())]

    async def _add(self, role: Role) -> None:
        name = f"{role}-{next(self._numbers[role])}"
        worker = ServedWorker(name, role)
        worker.process = self._make(worker)
        self._workers[role].append(worker)
        try:
            await worker.process.start()
        except PacelineError:
            self._workers[role].remove(worker)
            raise
        worker.tasks.append(self._supervise(worker.process))
        if self._first_are_ready:
            worker.tasks.append(asyncio.create_task(worker.process.ready_or_stopped()))

    def _begin_drain(self, worker: ServedWorker) -> None:
        self._workers[worker.role].remove(worker)
        self._draining[worker.role].add(worker)
        worker.waits = True
        for task in worker.tasks:
            task.cancel()
        worker.tasks = [asyncio.create_task(self._end(worker), name=f"drain {worker.name}")]

    def _stay(self, worker: ServedWorker) -> None:
        """Keep a worker that waits for another one to be ready before it drains."""
        for task in worker.tasks:
            task.cancel()
        worker.waits = False
        self._draining[worker.role].discard(worker)
        self._workers[worker.role].insert(0, worker)
        worker.tasks = [self._supervise(worker.process)]
        self._tell(f"  {worker.name:<12} goes on, because no other worker of its role can be started")

    async def _end(self, worker: ServedWorker) -> None:
        await self._replaced(worker)
        worker.waits = False
        self._tell(f"  {worker.name:<12} drains")
        await self._drain(worker.process)
        self._draining[worker.role].discard(worker)
        self._tell(f"  {worker.name:<12} has ended")

    async def _replaced(self, worker: ServedWorker) -> None:
        """Wait while a worker serves, its role has other workers that do not serve yet, and no other one that serves.

        The wait ends when one of them serves or all are given up; the start of a process has a deadline.
        """
        while True:
            others = self._workers[worker.role]
            if not worker.process.is_ready or not others or any(each.process.is_ready for each in others):
                return
            await asyncio.sleep(LOOK_SECONDS)


async def tell_role(credentials: Credentials, worker: ServedWorker, role: Role) -> None:
    """Tell a running worker to take another role. Raises PacelineError if the worker refuses or does not answer."""
    channel = open_channel(worker.process.address, credentials)
    try:
        await set_role(channel, worker.name, role)
    finally:
        await channel.close(None)
