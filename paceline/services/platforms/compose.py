"""Workers as containers of docker compose, on one docker engine.

Containers are added and removed in the way of `docker compose up --scale`. A new container is a copy of another
container of its service, with the same labels, so that compose treats it as its own. The last container of a service is
stopped but not removed, because the next container will be its copy.

A container starts with the role of its service. A person may give its worker another role at the gateway; then it
counts as a worker of that role until it starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.planner.reports import ROLES, Role
from paceline.services.common.tasks import end_tasks
from paceline.services.platforms.platform import Ability, KnownWorker, PlatformRole, PlatformState

PROJECT = "com.docker.compose.project"
SERVICE = "com.docker.compose.service"
NUMBER = "com.docker.compose.container-number"
ONE_OFF = "com.docker.compose.oneoff"
CALL_SECONDS = 20.0
"""Deadline of one call to the docker engine, in seconds."""
GRACE_SECONDS = 60
"""Seconds that a worker has to drain if its service has no stop_grace_period."""

THREADS = 256
"""Largest number of simultaneous calls to the engine. Each drain occupies one until its container has ended."""

Json = dict[str, Any]
Workers = Callable[[], Awaitable[Mapping[str, KnownWorker]]]
"""A function that returns all workers by id, in the order of their starts. Raises UnavailableError."""
Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


class DockerEngine(Protocol):
    """The calls to the docker engine that this platform needs, as in `docker.APIClient`. They raise DockerException."""

    def containers(self, *, all: bool, filters: Mapping[str, Any]) -> list[Json]: ...
    def inspect_container(self, container: str) -> Json: ...
    def create_container_from_config(self, config: Json, name: str) -> Json: ...
    def start(self, container: str) -> None: ...
    def stop(self, container: str, timeout: int) -> None: ...
    def remove_container(self, container: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Container:
    """A container of a service, as the planner sees it."""

    id: str
    service: str
    number: int
    role: str
    """The present role of the worker in the container."""
    runs: bool
    """Whether the container is running, or will be started again after it ends."""
    leaves: bool
    """Whether the container ends after its worker has drained, or is being removed."""
    serves: bool
    """Whether the worker in the container is ready."""
    is_dead: bool
    """Whether the engine failed to remove the container. Only its name is still in use."""

    @staticmethod
    def of(
        listed: Json, service_role: Role, worker: KnownWorker | None, last: Mapping[str, str], leaving: Collection[str]
    ) -> Container:
        """Return the container that an item of the engine's list describes.

        Args:
            service_role: the role with which a worker in this container starts.
            worker: the newest worker in this container; None if Redis knows none.
            last: the roles of containers that were running or leaving when the engine last listed them, by id. They
                count while Redis does not know a worker.
            leaving: ids of the containers that end after their drain.
        """
        container_id, labels = listed["Id"], listed["Labels"]
        number = str(labels.get(NUMBER, "0"))
        runs = listed["State"] in ("running", "restarting", "paused")
        leaves = container_id in leaving or listed["State"] == "removing"
        role = worker.role if worker else last.get(container_id, service_role)
        return Container(
            container_id,
            labels[SERVICE],
            int(number) if number.isdigit() else 0,
            role=role if runs or leaves else service_role,
            runs=runs,
            leaves=leaves,
            serves=worker is not None and worker.is_ready,
            is_dead=listed["State"] == "dead",
        )


def serves_in(worker_id: str, container: str) -> bool:
    """Return whether the worker runs in the container: a worker's id has its host's name, which is the short id."""
    return container[:12] in worker_id


def open_compose(path: str, project: str, workers: Workers, prefix: str = "") -> ComposePlatform:
    """Return the platform of a project.

    Args:
        path: Unix socket of the docker engine.
        project: name of the project; "" for the project of the container in which this process runs.
        workers: returns the present workers.
        prefix: prefix of the roles in the names of the services.

    Raises:
        ConfigError: there is no engine, no such project, or the project is not known.
    """
    if not path:
        raise ConfigError("--platform compose needs --docker-socket, such as --docker-socket /var/run/docker.sock")
    import docker
    from docker.errors import DockerException

    try:
        engine = docker.APIClient(base_url=f"unix://{path}", timeout=CALL_SECONDS)
        engine.ping()
        if not project:
            project = engine.inspect_container(socket.gethostname())["Config"]["Labels"][PROJECT]
    except LookupError:
        raise ConfigError("this container belongs to no compose project: name one with --compose-project") from None
    except DockerException as error:
        advice = "" if project else "; outside of a container, name the project with --compose-project"
        raise ConfigError(f"no docker engine answers at --docker-socket {path}: {error}{advice}") from None
    return ComposePlatform(engine, project, workers, DockerException, prefix)


class ComposePlatform:
    """The workers of one fleet of a compose project. Its services are named after the roles, with a prefix.

    Args:
        workers: returns the present workers.
        failure: base class of the errors that `engine` raises.
    """

    name = "compose"
    abilities: frozenset[Ability] = frozenset({"choose"})

    def __init__(
        self, engine: DockerEngine, project: str, workers: Workers, failure: type[Exception], prefix: str = ""
    ) -> None:
        self._engine = engine
        self._project = project
        self._workers = workers
        self._prefix = prefix
        self._failure = failure
        self._ending: dict[str, asyncio.Task[None]] = {}
        """The drains under way, by id of the container."""
        self._inherited: set[str] = set()
        """Ids of the containers that an earlier planner has told to end."""
        self._takes_over = False
        """Whether the next call of `state` must find these containers."""
        self._last: dict[str, str] = {}
        """The roles of the workers in containers that were running or leaving when the engine last listed them, by id
        of the container.
        """
        self._acting = asyncio.Lock()
        # asyncio has few threads of its own, so drains would make other calls wait.
        self._threads = ThreadPoolExecutor(THREADS, "compose")

    def take_over(self) -> None:
        """Find the drains of the previous planner at the next call of `state`."""
        self._takes_over = True

    async def state(self) -> PlatformState:
        """Return the numbers of workers by role. A role without any container, even a stopped one, cannot be scaled."""
        found = [each for each in await self._containers() if not each.is_dead]
        roles: dict[Role, PlatformRole] = {}
        for role in ROLES:
            if any(each.service == self._prefix + role for each in found):
                members = [each for each in found if each.role == role]
                running = sum(each.runs and not each.leaves for each in members)
                roles[role] = PlatformRole(running, running, sum(each.leaves for each in members))
        return PlatformState(roles)

    async def scale(self, role: Role, wanted: int, victims: Sequence[str] = ()) -> None:
        """Keep `wanted` containers of a role: start or copy some, or end some, first those of `victims`."""
        async with self._acting:
            found = await self._containers()
            service = self._prefix + role
            members = [each for each in found if each.service == service]
            staying = [each for each in found if not each.leaves and not each.is_dead]
            running = [each for each in staying if each.role == role and each.runs]
            for each in leaving(running, len(running) - wanted, victims):
                staying.remove(each)
                is_last = each.service not in [other.service for other in staying]
                self._ending[each.id] = asyncio.create_task(self._end(each, is_last), name=f"drain {role}")
            copies = [each for each in staying if each.service == service]
            stopped = [each for each in copies if not each.runs]
            lacking = wanted - len(running)
            for each in stopped[: max(0, lacking)]:
                await self._call(self._engine.start, each.id)
            used = {each.number for each in members}
            for _ in range(lacking - len(stopped)):
                if not copies:
                    raise UnavailableError(f"the compose project {self._project} has no container of {service} to copy")
                number = next(number for number in range(1, 1 + len(used) + 1) if number not in used)
                used.add(number)
                await self._copy(copies[0], number)

    async def flip(self, worker_id: str, role: Role) -> None:
        """Refuse with UnavailableError, because a container that starts again has the role of its service again."""
        raise UnavailableError("a container of docker compose cannot keep another role than that of its service")

    async def close(self) -> None:
        """Release the connection to the engine. Containers that drain end by themselves."""
        await end_tasks(*self._ending.values())
        self._threads.shutdown(wait=False)
        await asyncio.to_thread(self._engine.close)

    async def _containers(self) -> list[Container]:
        """Return the containers of all roles by number."""
        workers = await self._workers()
        # A container whose drain ends during the call may still be listed as running.
        leaving = {*self._ending}
        filters = {"label": [f"{PROJECT}={self._project}", f"{ONE_OFF}=False"]}
        listed = await self._call(lambda: self._engine.containers(all=True, filters=filters))
        newest = {
            each["Id"]: worker for each in listed for name, worker in workers.items() if serves_in(name, each["Id"])
        }
        leaving |= self._ending.keys() | self._find_inherited(listed, newest)
        services = {self._prefix + role: role for role in ROLES}
        found = [
            Container.of(each, services[service], newest.get(each["Id"]), self._last, leaving)
            for each in listed
            if (service := each["Labels"].get(SERVICE)) in services
        ]
        self._last = {each.id: each.role for each in found if each.runs or each.leaves}
        return sorted(found, key=lambda each: each.number)

    def _find_inherited(self, listed: Sequence[Json], workers: Mapping[str, KnownWorker]) -> set[str]:
        """Return the containers that an earlier planner has told to end, and that have not ended yet.

        These are the containers whose workers drain when this planner takes over. A worker that serves again had
        drained for another reason, such as a change of its role, so its container stays.

        Args:
            listed: all containers, as the engine lists them.
            workers: the newest worker of each container, by the container's id.
        """
        draining = {container for container, worker in workers.items() if worker.drains}
        if self._takes_over:
            self._inherited, self._takes_over = draining, False
        running = {each["Id"] for each in listed if each["State"] == "running"}
        self._inherited &= running - (workers.keys() - draining)
        return self._inherited

    async def _copy(self, original: Container, number: int) -> None:
        found = await self._call(self._engine.inspect_container, original.id)
        name = f"{self._project}-{original.service}-{number}"
        made = await self._call(self._engine.create_container_from_config, copied_config(found, number), name)
        await self._call(self._engine.start, made["Id"])

    async def _end(self, container: Container, is_last: bool) -> None:
        """Stop a container, after its worker has drained, and remove it unless it is the last of its service."""
        try:
            found = await self._call(self._engine.inspect_container, container.id)
            grace = found["Config"].get("StopTimeout") or GRACE_SECONDS
            # The engine kills the container after this time.
            await self._call(lambda: self._engine.stop(container.id, timeout=grace))
            if not is_last:
                await self._call(self._engine.remove_container, container.id)
        except UnavailableError as error:
            log.warning("container %s: %s", container.id[:12], error)
        finally:
            del self._ending[container.id]

    async def _call(self, call: Callable[..., Answer], *arguments: Any) -> Answer:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *arguments))
        except self._failure as error:
            raise UnavailableError(f"the docker engine refuses or does not answer: {error}") from error


def leaving(running: Sequence[Container], count: int, victims: Sequence[str]) -> list[Container]:
    """Return the `count` containers to end: first containers that do not serve, then those of the chosen workers, then
    the newest.
    """
    chosen = [each for worker in victims for each in running if serves_in(worker, each.id)]
    newest = [each for each in reversed(running) if each not in chosen]
    return sorted([*chosen, *newest], key=lambda each: each.serves)[: max(0, count)]


def copied_config(found: Json, number: int) -> Json:
    """Return the configuration of a copy of a container.

    Args:
        found: the original, as the engine describes it.
        number: the copy's number in its service.
    """
    config = dict(found["Config"])
    config["Labels"] = {**config["Labels"], NUMBER: str(number)}
    with contextlib.suppress(KeyError):
        del config["Labels"]["com.docker.compose.replace"]
    if config.get("Hostname") and found["Id"].startswith(config["Hostname"]):
        del config["Hostname"]  # the engine chose this value, and chooses another one for the copy
    service = config["Labels"][SERVICE]
    # Networks of the engine itself, such as "none", take no aliases.
    networks = {
        name: {"Aliases": [service]} if service in (network.get("Aliases") or ()) else {}
        for name, network in found["NetworkSettings"]["Networks"].items()
    }
    return {**config, "HostConfig": found["HostConfig"], "NetworkingConfig": {"EndpointsConfig": networks}}
