"""Workers as containers of docker compose, on one docker engine.

Containers are added and removed as `docker compose up --scale` does it. A new one is a copy of another container of its
service, with its labels, so that compose takes it for its own. The last container of a service is stopped and not
removed, because the next one is its copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.planner.reports import ROLES, Role
from paceline.services.common.tasks import end_tasks
from paceline.services.platforms.platform import Ability, PlatformState, RoleState

PROJECT = "com.docker.compose.project"
SERVICE = "com.docker.compose.service"
NUMBER = "com.docker.compose.container-number"
ONE_OFF = "com.docker.compose.oneoff"
CALL_SECONDS = 20.0
"""Deadline of one call of the engine, in seconds."""
GRACE_SECONDS = 60
"""Time that a worker has to drain if its service has no stop_grace_period, in seconds."""

THREADS = 256
"""Calls of the engine at the same time, at most. Each drain takes one until its container has ended."""

Json = dict[str, Any]
Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


class Engine(Protocol):
    """The calls of the docker engine that are used, as `docker.APIClient` has them. They raise DockerException."""

    def containers(self, *, all: bool, filters: Mapping[str, Any]) -> list[Json]: ...
    def inspect_container(self, container: str) -> Json: ...
    def create_container_from_config(self, config: Json, name: str) -> Json: ...
    def start(self, container: str) -> None: ...
    def stop(self, container: str, timeout: int) -> None: ...
    def remove_container(self, container: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Container:
    """A container of a service."""

    id: str
    number: int
    runs: bool
    """Whether it runs, or is started again when it ends."""

    @staticmethod
    def of(listed: Json) -> Container:
        number = str(listed["Labels"].get(NUMBER, "0"))
        runs = listed["State"] in ("running", "restarting", "paused")
        return Container(listed["Id"], int(number) if number.isdigit() else 0, runs)

    def serves_as(self, worker_id: str) -> bool:
        """Return whether the worker runs in this container: a worker's name has its host's name, the short id."""
        return self.id[:12] in worker_id


def open_compose(path: str, project: str, prefix: str = "") -> ComposePlatform:
    """Return the platform of a project.

    Args:
        path: Unix socket of the docker engine.
        project: name of the project; "" for the one whose container this process runs in.
        prefix: what stands in front of the roles in the names of the services.

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
    return ComposePlatform(engine, project, DockerException, prefix)


class ComposePlatform:
    """The workers of one fleet of a compose project. Its services have the names of the roles, behind a prefix.

    Args:
        failure: base class of the errors that `engine` raises.
    """

    name = "compose"
    abilities: frozenset[Ability] = frozenset({"choose"})

    def __init__(self, engine: Engine, project: str, failure: type[Exception], prefix: str = "") -> None:
        self._engine = engine
        self._project = project
        self._prefix = prefix
        self._failure = failure
        self._ending: dict[str, asyncio.Task[None]] = {}
        """The drains under way, by id of the container."""
        self._acting = asyncio.Lock()
        # asyncio's own threads are few, so that drains would keep other calls waiting.
        self._threads = ThreadPoolExecutor(THREADS, "compose")

    async def state(self) -> PlatformState:
        """See `Platform.state`. A role without any container, even a stopped one, cannot be scaled."""
        roles: dict[Role, RoleState] = {}
        for role in ROLES:
            if containers := await self._containers(role):
                running = sum(each.runs and each.id not in self._ending for each in containers)
                roles[role] = RoleState(running, running, sum(each.id in self._ending for each in containers))
        return PlatformState(roles)

    async def scale(self, role: Role, wanted: int, victims: Sequence[str] = ()) -> None:
        """See `Platform.scale`."""
        async with self._acting:
            containers = [each for each in await self._containers(role) if each.id not in self._ending]
            if not containers:
                service = self._prefix + role
                raise UnavailableError(f"the compose project {self._project} has no container of {service} to copy")
            running = [each for each in containers if each.runs]
            stopped = [each for each in containers if not each.runs]
            for each in leaving(running, len(running) - wanted, victims):
                is_last = wanted == 0 and each == running[0] and not stopped
                self._ending[each.id] = asyncio.create_task(self._end(each, is_last), name=f"drain {role}")
            for each in stopped[: max(0, wanted - len(running))]:
                await self._call(self._engine.start, each.id)
            used = {each.number for each in containers}
            for _ in range(wanted - len(running) - len(stopped)):
                number = next(number for number in range(1, 1 + len(used) + 1) if number not in used)
                used.add(number)
                await self._copy(containers[0].id, role, number)

    async def flip(self, worker_id: str, role: Role) -> None:
        """See `Platform.flip`. A container's labels name its role, so it cannot change."""
        raise UnavailableError("a container of docker compose cannot change its role")

    async def close(self) -> None:
        """See `Platform.close`. Containers that drain end by themselves."""
        await end_tasks(*self._ending.values())
        self._threads.shutdown(wait=False)
        await asyncio.to_thread(self._engine.close)

    async def _containers(self, role: Role) -> list[Container]:
        """Return the containers of a service by number."""
        filters = {"label": [f"{PROJECT}={self._project}", f"{SERVICE}={self._prefix}{role}", f"{ONE_OFF}=False"]}
        listed = await self._call(lambda: self._engine.containers(all=True, filters=filters))
        return sorted(map(Container.of, listed), key=lambda each: each.number)

    async def _copy(self, original: str, role: Role, number: int) -> None:
        found = await self._call(self._engine.inspect_container, original)
        name = f"{self._project}-{self._prefix}{role}-{number}"
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
    """Return the `count` containers that end: those of the chosen workers, then the newest ones."""
    chosen = [each for worker in victims for each in running if each.serves_as(worker)]
    newest = [each for each in reversed(running) if each not in chosen]
    return [*chosen, *newest][: max(0, count)]


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
        del config["Hostname"]  # the engine chose it; the copy gets its own
    service = config["Labels"][SERVICE]
    # Networks of the engine itself, such as "none", take no aliases.
    networks = {
        name: {"Aliases": [service]} if service in (own.get("Aliases") or ()) else {}
        for name, own in found["NetworkSettings"]["Networks"].items()
    }
    return {**config, "HostConfig": found["HostConfig"], "NetworkingConfig": {"EndpointsConfig": networks}}
