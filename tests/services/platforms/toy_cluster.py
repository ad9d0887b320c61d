"""An API server (kmock) with the objects of kubernetes/base that the planner uses, and controllers of a few lines.

kmock keeps the objects and speaks HTTP. This file adds what a client has to cope with: objects that others change
(409), versions that are too old (410), watches that break, and events that come late or out of order. No kubelet runs:
a test itself lets pods start.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from typing import Any

from kmock import KubernetesEmulator, KubernetesError, action, resource

NAMESPACE = "paceline"
PODS = resource("", "v1", "pods")
DEPLOYMENTS = resource("apps", "v1", "deployments")
CONFIG_MAPS = resource("", "v1", "configmaps")

Json = dict[str, Any]


class ToyCluster(KubernetesEmulator):  # type: ignore[misc]  # kmock's base classes have no types for mypy
    """One namespace."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.events: list[tuple[int, str, Json]] = []
        """Version, kind and object of each change of a pod."""
        self.oldest = 0
        """Watches from before this version get 410."""
        self.changes: list[tuple[Json, Json]] = []
        """Each pod that a client has changed, before and after the change."""
        self.conflicts = 0
        """Number of next patches that meet a change by somebody else."""
        self.is_down = False
        self.disorder: list[int] = []
        """If not empty, the next watch sends its first events in this order."""
        self.watches = 0
        self._versions = itertools.count(100)
        self._names = itertools.count()
        self._news = asyncio.Condition()
        self._cuts = 0

    def add(self, resource: Any, name: str, **fields: Any) -> None:
        """Make an object that is no pod."""
        metadata = {"name": name, "namespace": NAMESPACE, "resourceVersion": str(next(self._versions))}
        self.objects[resource, NAMESPACE, name] = {"metadata": metadata, **fields}

    def deployment(self, name: str, replicas: int) -> None:
        """Make a Deployment without pods; `control` makes them."""
        self.add(DEPLOYMENTS, name, kind="Deployment", spec={"replicas": replicas}, status={"observedGeneration": 1})

    def raw(self, kind: Any, name: str) -> Json:
        found = self.objects[kind, NAMESPACE, name]
        return dict(copy.deepcopy(found.raw))

    def pods(self) -> list[Json]:
        """Return all pods, the oldest first."""
        found = [self.objects[key] for key in list(self.objects) if key[0] == PODS]
        return sorted((dict(each.raw) for each in found if not each.deleted), key=lambda pod: pod["metadata"]["uid"])

    async def note(self, kind: str, pod: Json) -> None:
        """Keep a changed pod with a new version and tell the watches."""
        pod = copy.deepcopy(pod)
        version = next(self._versions)
        pod["metadata"]["resourceVersion"] = str(version)
        key = PODS, NAMESPACE, pod["metadata"]["name"]
        if kind == "DELETED":
            self.objects[key].delete()
        elif key in self.objects and not self.objects[key].deleted:
            self.objects[key].patch(pod)
        elif key in self.objects:
            self.objects[key].create(pod)
        else:
            self.objects[key] = pod
        async with self._news:
            self.events.append((version, kind, pod))
            self._news.notify_all()

    async def make_pod(self, component: str) -> str:
        number = next(self._names)
        labels = {"app.kubernetes.io/component": component}
        if component == "worker":
            labels["paceline/role"] = "decode"
        metadata = {
            "name": f"{component}-{number}",
            "namespace": NAMESPACE,
            "uid": f"uid-{number:03}",
            "creationTimestamp": f"2026-11-26T12:00:{number:02}Z",
            "labels": labels,
        }
        await self.note("ADDED", {"metadata": metadata, "spec": {}, "status": {"phase": "Pending"}})
        return f"{component}-{number}"

    async def set_status(self, name: str, **status: Any) -> None:
        pod = self.raw(PODS, name)
        await self.note("MODIFIED", {**pod, "status": {**pod["status"], **status}})

    async def start(self, *names: str) -> None:
        """Let pods become ready, as a kubelet does; without names, all."""
        for name in names or [pod["metadata"]["name"] for pod in self.pods()]:
            pod = self.raw(PODS, name)
            status = {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"state": {"running": {}}, "restartCount": 0}],
            }
            await self.note("MODIFIED", {**pod, "spec": {"nodeName": "n"}, "status": status})

    async def control(self, component: str = "worker") -> None:
        """Make and end pods until there are as many as wanted, as the controllers of Deployments do.

        The order is the documented one: pods without a node, pending ones, pods that are not ready, the lowest cost.
        """
        wanted = self.raw(DEPLOYMENTS, component)["spec"]["replicas"]
        own = [pod for pod in self.pods() if pod["metadata"]["labels"]["app.kubernetes.io/component"] == component]
        alive = [pod for pod in own if "deletionTimestamp" not in pod["metadata"]]

        def order(pod: Json) -> tuple[bool, bool, bool, int]:
            cost = pod["metadata"].get("annotations", {}).get("controller.kubernetes.io/pod-deletion-cost", "0")
            is_ready = any(each["type"] == "Ready" for each in pod["status"].get("conditions", []))
            return "nodeName" in pod["spec"], pod["status"]["phase"] == "Running", is_ready, int(cost)

        for pod in sorted(alive, key=order)[: max(0, len(alive) - wanted)]:
            pod["metadata"]["deletionTimestamp"] = "2026-11-26T13:00:00Z"
            await self.note("MODIFIED", pod)
        for _ in range(wanted - len(alive)):
            await self.make_pod(component)

    async def end(self) -> None:
        """Let all pods end that were told to."""
        for pod in self.pods():
            if "deletionTimestamp" in pod["metadata"]:
                await self.note("DELETED", pod)

    async def cut_watches(self) -> None:
        """Break the connections of all watches."""
        async with self._news:
            self._cuts += 1
            self._news.notify_all()

    async def _handle(self, request: Any) -> Any:
        if self.is_down:
            raise KubernetesError(status=503, message="the API server is starting")
        if request.action == action.UPDATE:
            self._condition(request)
            if request.resource == PODS:
                before = self.raw(PODS, request.name)
                answer = await super()._handle(request)
                self.changes.append((before, self.raw(PODS, request.name)))
                await self.note("MODIFIED", self.raw(PODS, request.name))
                return answer
        return await super()._handle(request)

    def _condition(self, request: Any) -> None:
        """Give an object that is being patched a new version. Raises KubernetesError if the patch wants another one."""
        key = request.resource, request.namespace, request.name
        if key not in self.objects or self.objects[key].deleted:
            raise KubernetesError(status=404, message="not found")
        metadata = request.data.setdefault("metadata", {})
        wanted, now = metadata.get("resourceVersion"), self.objects[key]["metadata"]["resourceVersion"]
        if wanted is not None and self.conflicts:
            self.conflicts -= 1
            self.objects[key].patch({"metadata": {"resourceVersion": str(next(self._versions))}})
            raise KubernetesError(status=409, message="the object has been modified")
        if wanted not in (None, now):
            raise KubernetesError(status=409, message="the object has been modified")
        metadata["resourceVersion"] = str(next(self._versions))

    async def _serve_list(self, request: Any) -> Any:
        version = self.events[-1][0] if self.events else 100
        return {"metadata": {"resourceVersion": str(version)}, "items": self.pods()}

    async def _serve_watch(self, request: Any) -> AsyncIterator[Any]:
        since = int(request.params["resourceVersion"])
        self.watches += 1
        cuts, at = self._cuts, next((i for i, event in enumerate(self.events) if event[0] > since), len(self.events))
        yield b""
        if since < self.oldest:
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
            return
        while cuts == self._cuts:
            batch, at = self.events[at:], len(self.events)
            if self.disorder:
                batch = [batch[place] for place in self.disorder if place < len(batch)]
                self.disorder = []
            for _, kind, pod in batch:
                yield {"type": kind, "object": pod}
            async with self._news:
                await self._news.wait_for(lambda: cuts != self._cuts or len(self.events) > at)  # noqa: B023
        yield b'{"type": "MODIF'  # the connection breaks in the middle of a line
