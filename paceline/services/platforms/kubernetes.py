"""Workers as pods of Kubernetes: the Deployments `worker` (prefill and decode), `encode` and `pool` of kubernetes/.

The wanted state is kept in the cluster (`Wish`), so that this object may be made anew at any time, and two of them do
no harm. A label of each pod holds its role. People change the number of workers with `kubectl scale`; only the planner
changes roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from paceline.core.errors import PacelineError, UnavailableError
from paceline.core.planner.reports import Role
from paceline.services.common.tasks import end_tasks
from paceline.services.platforms.kubernetes_api import GoneError, Json, KubernetesApi, MissingError
from paceline.services.platforms.kubernetes_pods import (
    COST,
    FIXED,
    ROLE_LABEL,
    CannotChooseError,
    Pod,
    PodBook,
    choose_victims,
    costs,
    living,
    needed_because,
    new_roles,
    problem_of,
)
from paceline.services.platforms.kubernetes_wish import Wish, failure_of, is_rolling, read_wish, replicas_of
from paceline.services.platforms.platform import Ability, PlatformRole, PlatformState

BLIND_SECONDS = 90.0
"""If the API server has sent nothing for this many seconds, the known state of the pods is too old to act on."""
SETTLE_SECONDS = 5.0
"""Roles of pods are compared with their wanted roles after each change, and at this interval, in seconds."""
PAUSE_SECONDS = 0.1
"""Changes of pods within this time after a first change are handled together, in seconds."""
FIRST_LIST_SECONDS = 30.0
"""Longest time until the first list of pods has come, in seconds."""

PODS = "app.kubernetes.io/name=paceline,app.kubernetes.io/component in (worker,encode,pool)"
_ROLES = "v1/configmaps/roles"

log = logging.getLogger(__name__)

Tell = Callable[[str, Role], Awaitable[None]]
"""A function that tells a worker, by its id, to take a role. A worker that has the role already does nothing.

Raises PacelineError."""


class KubernetesPlatform:
    """The platform of a fleet in Kubernetes.

    Args:
        api: the API of the fleet's namespace.
        tell: tells a running worker its role.
    """

    name = "kubernetes"
    abilities: frozenset[Ability] = frozenset({"choose", "flip", "spread"})

    def __init__(self, api: KubernetesApi, tell: Tell) -> None:
        self._api = api
        self._tell = tell
        self._book = PodBook()
        self._heard = -float("inf")
        """Time of the API server's last message about pods, on the monotonic clock."""
        self._listed, self._changed = asyncio.Event(), asyncio.Event()
        self._told: dict[str, tuple[int, Role]] = {}
        """For each pod, by uid, its number of restarts and its role at the time when the worker was told its role."""
        self._acting = asyncio.Lock()
        """Held while several objects are changed, so that nobody acts on a half-finished change."""
        self._tasks: list[asyncio.Task[None]] = []

    def take_over(self) -> None:
        """Do nothing, because this platform itself knows which workers drain."""

    async def state(self) -> PlatformState:
        """Return the numbers of workers by role, from the wish and the known pods, and the reasons why pods do not
        run.
        """
        await self._see()
        async with self._acting:
            parts: list[tuple[Role, Json, int]] = []
            if (worker := await self._find("worker")) is not None:
                wish = read_wish(await self._api.get(_ROLES), replicas_of(worker))
                parts += [("prefill", worker, wish.prefill), ("decode", worker, wish.decode)]
            for role in FIXED:
                if (found := await self._find(role)) is not None:
                    parts.append((role, found, replicas_of(found)))
        roles: dict[Role, PlatformRole] = {}
        trouble: dict[Role, str] = {}
        for role, deployment, wanted in parts:
            pods = [pod for pod in self._book.pods(component_of(role)) if pod.role == role]
            running = sum(pod.phase == "Running" for pod in living(pods))
            roles[role] = PlatformRole(wanted, running, sum(pod.ending for pod in pods))
            if reason := problem_of(pods) or failure_of(deployment):
                trouble[role] = reason
        return PlatformState(roles, trouble)

    async def scale(self, role: Role, wanted: int, victims: Sequence[str] = ()) -> None:
        """Keep `wanted` workers of a role from now on. Also raises UnavailableError if Kubernetes would end a pod that
        was not chosen.
        """
        await self._see()
        async with self._acting:
            deployment = await self._api.get(_deployment(component_of(role)))
            before = replicas_of(deployment)
            if role in FIXED:
                await self._mark_victims(deployment, role, wanted, victims)
                await self._set_replicas(role, before, wanted)
                return
            wish = read_wish(await self._api.get(_ROLES), before)
            new = wish.with_role(role, wanted, before)
            await self._mark_victims(deployment, role, new.total, victims)
            await self._set_wish(before, wish, new)
            await self._reach(new)
        self._changed.set()

    async def flip(self, worker_id: str, role: Role) -> None:
        """Give a worker's pod another role: change the wish and the pod's label, and tell the worker if it is ready."""
        await self._see()
        async with self._acting:
            pod = self._book.find(worker_id)
            if pod is None or pod.ending or {pod.role, role}.intersection(FIXED):
                raise UnavailableError(f"there is no worker {worker_id} that could become a {role} worker")
            if pod.role != role:
                if why := needed_because(self._book.pods("worker"), pod):
                    raise UnavailableError(f"{worker_id} stays a {pod.role} worker: {why}")
                replicas = replicas_of(await self._api.get(_deployment("worker")))
                wish = read_wish(await self._api.get(_ROLES), replicas)
                moves = new_roles(self._book.pods("worker"), wish.prefill, wish.decode)
                if role not in [each for _, each in moves]:  # an earlier call that failed may have done this already
                    step = 1 if role == "prefill" else -1
                    await self._set_wish(replicas, wish, Wish(wish.prefill + step, wish.decode - step))
                await self._label(pod, role)
        if not pod.ready:
            return  # a pod that starts later reads its label, and its worker is told the role when it is ready
        try:
            await self._tell(worker_id, role)
        except PacelineError as error:
            raise UnavailableError(f"{worker_id} does not become a {role} worker: {error}") from error

    async def close(self) -> None:
        """Stop watching the pods, and close the connections to the API server."""
        await end_tasks(*self._tasks)
        self._tasks = []
        await self._api.close()

    async def _see(self) -> None:
        """Wait for the first list of pods. Raises UnavailableError if the known state is too old to act on."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._watch(), name="watch pods"),
                asyncio.create_task(self._settle(), name="roles of pods"),
            ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LIST_SECONDS):
                await self._listed.wait()
        if time.monotonic() - self._heard > BLIND_SECONDS:
            raise UnavailableError("the API server says nothing about pods; the planner's log has the reason")

    async def _find(self, name: str) -> Json | None:
        """Return a Deployment of workers; None if the fleet has none of this name."""
        try:
            return await self._api.get(_deployment(name))
        except MissingError:
            return None

    async def _mark_victims(self, deployment: Json, role: Role, total: int, victims: Sequence[str]) -> None:
        """Give the pods that shall end the lowest costs, if there are too many."""
        component = component_of(role)
        if total >= replicas_of(deployment):
            return
        if is_rolling(deployment):
            raise UnavailableError(f"a new version of {component} is being rolled out; fewer workers after it")
        pods = self._book.pods(component)
        try:
            chosen = choose_victims(pods, role, len(living(pods)) - total, victims)
        except CannotChooseError as error:
            raise UnavailableError(str(error)) from None
        for name, cost in costs(pods, chosen).items():
            annotation = str(cost) if cost else None  # None removes it
            found = await self._api.patch(f"v1/pods/{name}", {"metadata": {"annotations": {COST: annotation}}})
            self._book.note("MODIFIED", found)

    async def _set_wish(self, replicas: int, old: Wish, new: Wish) -> None:
        def make(found: Json) -> Json | None:
            now = read_wish(found, replicas)
            if now not in (old, new):
                raise UnavailableError(f"somebody else has set the roles: {now.prefill} prefill, {now.decode} decode")
            return None if now == new else {"data": new.to_data()}

        await self._api.change(_ROLES, make)

    async def _set_replicas(self, component: str, before: int, total: int) -> None:
        """Change the number of pods through the scale of their Deployment."""

        def make(found: Json) -> Json | None:
            now = replicas_of(found)
            if now not in (before, total):
                raise UnavailableError(f"somebody else has scaled {component} from {before} to {now}")
            return None if now == total else {"spec": {"replicas": total}}

        await self._api.change(f"{_deployment(component)}/scale", make)

    async def _reach(self, wish: Wish) -> None:
        """Finish a change of which only the wish has been written."""
        if wish.before is not None:
            await self._set_replicas("worker", wish.before, wish.total)
            await self._api.patch(_ROLES, {"data": {"before": None}})

    async def _label(self, pod: Pod, role: Role) -> None:
        """Give a pod the label of a role, unless the pod has changed since we looked at it."""
        metadata = {"labels": {ROLE_LABEL: role}, "resourceVersion": pod.version}
        self._book.note("MODIFIED", await self._api.patch(f"v1/pods/{pod.name}", {"metadata": metadata}))

    async def _watch(self) -> None:
        """Keep the book of pods up to date, until cancelled."""
        version, pause = "", 0.0
        while True:
            try:
                if not version:
                    found, version = await self._api.list("v1/pods", PODS)
                    self._book.replace(found)
                    self._note_news()
                async for kind, each in self._api.watch("v1/pods", PODS, version):
                    version = each["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        self._book.note(kind, each)
                    self._note_news()
                    pause = 0.0
            except GoneError:
                version = ""
            except UnavailableError as error:
                log.warning("%s; trying again", error)
                pause = min(10.0, 2 * pause or 0.25)
            except Exception:
                log.exception("unexpected error in the watch of pods")
                version, pause = "", 10.0
            await asyncio.sleep(random.uniform(pause / 2, pause))

    def _note_news(self) -> None:
        self._heard = time.monotonic()
        self._listed.set()
        self._changed.set()

    async def _settle(self) -> None:
        """Give pods their roles after each change, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_SECONDS):
                    await self._changed.wait()
            await asyncio.sleep(PAUSE_SECONDS)
            self._changed.clear()
            try:
                await self._give_roles()
            except PacelineError as error:
                log.warning("roles of pods: %s; trying again", error)
            except Exception:
                log.exception("unexpected error while giving pods their roles")

    async def _give_roles(self) -> None:
        async with self._acting:
            if (worker := await self._find("worker")) is None:
                return  # the workers of a model that is an encoder keep their role
            wish = read_wish(await self._api.get(_ROLES), replicas_of(worker))
            await self._reach(wish)  # the planner may have ended between the two writes
            for pod, role in new_roles(self._book.pods("worker"), wish.prefill, wish.decode):
                log.info("pod %s becomes a %s worker", pod.name, role)
                await self._label(pod, role)
        pods = living(self._book.pods("worker"))
        self._told = {pod.uid: self._told[pod.uid] for pod in pods if pod.uid in self._told}
        for pod in pods:
            # A container may have started before the label changed.
            if pod.ready and self._told.get(pod.uid) != (pod.restarts, pod.role):
                try:
                    await self._tell(pod.name, pod.role)
                    self._told[pod.uid] = pod.restarts, pod.role
                except PacelineError as error:
                    log.warning("cannot tell %s that it is a %s worker: %s", pod.name, pod.role, error)


def _deployment(name: str) -> str:
    return f"apps/v1/deployments/{name}"


def component_of(role: Role) -> str:
    """Return the name of the Deployment of a role's workers."""
    return role if role in FIXED else "worker"
