"""The pods of workers: their known state, the pods that a ReplicaSet would end, and the role that each pod should have.

Pure functions and one class without I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.planner.reports import Role

ROLE_LABEL = "paceline/role"
COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation: among pods that are equally ready, a ReplicaSet ends those with the lowest cost first."""

FIXED: tuple[Role, ...] = ("encode", "pool")
"""Roles that workers keep. Their pods belong to a Deployment of the role's name."""
_STUCK = ("CrashLoopBackOff", "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
"""Reasons why a container waits that do not go away by themselves."""
_PHASES = {"Pending": 0, "Unknown": 1}
"""The order in which a ReplicaSet ends pods, by phase. All other phases come last."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a worker, as the API server described it last."""

    name: str
    uid: str
    version: str
    """The resourceVersion of the object that this description was made of."""
    component: str = "worker"
    """Name of the Deployment to which the pod belongs: `worker`, or a role of FIXED."""
    role: Role = "decode"
    phase: str = "Pending"
    placed: bool = False
    """Whether Kubernetes has placed the pod on a node."""
    started: bool = False
    """Whether the pod's container has started, and so has read the role from the pod's label."""
    ready: bool = False
    ending: bool = False
    """Whether Kubernetes has told the pod to end."""
    cost: int = 0
    created: str = ""
    """Time of creation as ISO 8601 text in UTC, so that texts sort by time; "" if unknown."""
    restarts: int = 0
    problem: str = ""
    """The reason why the pod does not run and will not run by itself; empty if nothing is wrong."""

    @property
    def rank(self) -> tuple[bool, int, bool]:
        """The order in which a ReplicaSet ends pods before it looks at their costs: lower ranks first."""
        return self.placed, _PHASES.get(self.phase, 2), self.ready

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Pod:
        """Return the pod that an object of the API describes."""
        metadata, status = found["metadata"], found.get("status", {})
        labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
        containers = status.get("containerStatuses") or []
        conditions = {each["type"]: each for each in status.get("conditions") or []}
        component = labels.get("app.kubernetes.io/component", "worker")
        cost = annotations.get(COST, "0")
        return cls(
            name=metadata["name"],
            uid=metadata.get("uid", ""),
            version=str(metadata.get("resourceVersion", "")),
            component=component,
            role=_role(component, labels),
            phase=status.get("phase", "Pending"),
            placed=bool(found.get("spec", {}).get("nodeName")),
            started=any("running" in each.get("state", {}) or each.get("restartCount") for each in containers),
            ready=conditions.get("Ready", {}).get("status") == "True",
            ending="deletionTimestamp" in metadata,
            cost=int(cost) if cost.lstrip("-").isdecimal() else 0,
            created=metadata.get("creationTimestamp", ""),
            restarts=sum(each.get("restartCount", 0) for each in containers),
            problem=_problem(conditions, [*(status.get("initContainerStatuses") or []), *containers]),
        )


def _role(component: str, labels: Mapping[str, str]) -> Role:
    """Return the role of a pod of a Deployment. Pods of `worker` have it in a label."""
    fixed = next((role for role in FIXED if role == component), None)
    return fixed or ("prefill" if labels.get(ROLE_LABEL) == "prefill" else "decode")


def _problem(conditions: Mapping[str, Any], containers: Iterable[Mapping[str, Any]]) -> str:
    """Return why a pod cannot be placed or started; empty if it can."""
    placed = conditions.get("PodScheduled", {})
    if placed.get("status") == "False" and placed.get("reason") == "Unschedulable":
        return f"no node has room: {placed.get('message', '')}"
    for container in containers:
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _STUCK:
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    return ""


class PodBook:
    """The pods of workers, from lists and watches. Their changes may come late, twice or out of order."""

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}
        """The known pods, by name."""
        self._gone: dict[str, str] = {}
        """The uids of pods that have ended since the last list, so that late news do not bring them back."""

    def replace(self, found: Iterable[Mapping[str, Any]]) -> None:
        """Replace all pods by a complete list. Newer descriptions, which came with an answer to a change, stay."""
        listed = {pod.name: pod for pod in map(Pod.of, found)}
        for name, pod in listed.items():
            known = self._pods.get(name)
            if known is not None and known.uid == pod.uid and is_newer(known.version, pod.version):
                listed[name] = known
        self._pods, self._gone = listed, {}

    def note(self, kind: str, found: Mapping[str, Any]) -> None:
        """Note one change: ADDED, MODIFIED or DELETED. An outdated change has no effect."""
        pod = Pod.of(found)
        known = self._pods.get(pod.name)
        if kind == "DELETED":
            self._gone[pod.uid] = pod.name
            if known is not None and known.uid == pod.uid:
                del self._pods[pod.name]
        elif pod.uid not in self._gone and (
            known is None or known.uid != pod.uid or not is_newer(known.version, pod.version)
        ):
            self._pods[pod.name] = pod

    def find(self, name: str) -> Pod | None:
        """Return the pod with this name, which is its worker's id; None if it has ended."""
        return self._pods.get(name)

    def pods(self, component: str) -> list[Pod]:
        """Return the pods of a Deployment, the oldest first, without pods that have ended."""
        members = [pod for pod in self._pods.values() if pod.component == component]
        return sorted(
            (pod for pod in members if pod.phase not in ("Succeeded", "Failed")),
            key=lambda pod: (pod.created, pod.name),
        )


def is_newer(version: str, other: str) -> bool:
    """Return whether a resourceVersion is newer than another. Kubernetes 1.35 promises that versions are growing
    numbers.

    Versions of another form are taken in the order in which they come.
    """
    return version.isdecimal() and other.isdecimal() and int(version) > int(other)


def living(pods: Iterable[Pod]) -> list[Pod]:
    """Return the pods that Kubernetes has not told to end."""
    return [pod for pod in pods if not pod.ending]


class CannotChooseError(Exception):
    """The ReplicaSet would end another pod than the chosen one. The message names it and the reason."""


def choose_victims(pods: Sequence[Pod], role: Role, count: int, wished: Sequence[str]) -> list[Pod]:
    """Return the pods of a role that shall end, in this order.

    A ReplicaSet ends pods that are not ready before all others, whatever their costs. So these come first, which loses
    no work, then the pods in `wished`, and then the youngest.

    Args:
        pods: all pods of the Deployment.
        count: number of pods that the ReplicaSet will end.

    Raises CannotChooseError if the ReplicaSet would end a pod of another role instead.
    """
    alive = living(pods)
    places = {name: place for place, name in enumerate(wished)}
    members = sorted((pod for pod in alive if pod.role == role), key=lambda pod: pod.created, reverse=True)
    chosen = sorted(members, key=lambda pod: (pod.rank, places.get(pod.name, len(places))))[:count]
    last = max((pod.rank for pod in chosen), default=None)
    for pod in alive:
        if last is not None and pod not in chosen and pod.rank < last:
            raise CannotChooseError(
                f"Kubernetes would end the {pod.role} pod {pod.name} first, because it is not ready"
                + (f" ({pod.problem})" if pod.problem else "")
            )
    return chosen


def costs(pods: Sequence[Pod], victims: Sequence[Pod]) -> dict[str, int]:
    """Return the costs to set, by pod. The first victim gets the lowest cost. Pods of earlier choices get 0 again."""
    wanted = {pod.name: place - len(victims) for place, pod in enumerate(victims)}
    return {pod.name: cost for pod in living(pods) if (cost := wanted.get(pod.name, 0)) != pod.cost}


def needed_because(pods: Sequence[Pod], pod: Pod) -> str:
    """Return why a pod must keep its role until another pod of the role is ready; empty if the pod may change its
    role.
    """
    stay = [each for each in living(pods) if each.role == pod.role and each.name != pod.name]
    if pod.ready and stay and not any(each.ready for each in stay):
        return f"{stay[0].name} is not ready yet"
    return ""


def new_roles(pods: Sequence[Pod], prefill: int, decode: int) -> list[tuple[Pod, Role]]:
    """Return the pods whose role should change, each with its new role.

    New pods start as decode workers. Pods whose container has not started can change their role at no cost, so they
    come first. Then come pods that are not ready, so that a role keeps its ready pods, and then the youngest pods,
    which have cached least.

    Args:
        pods: all pods of the Deployment `worker`.
        prefill: number of prefill workers that there should be.
        decode: number of decode workers that there should be.
    """
    alive = living(pods)
    of: dict[Role, list[Pod]] = {role: [pod for pod in alive if pod.role == role] for role in ("prefill", "decode")}
    wanted: dict[Role, int] = {"prefill": prefill, "decode": decode}
    pairs: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for few, many in pairs:
        moves = min(wanted[few] - len(of[few]), len(of[many]) - wanted[many])
        if moves > 0:
            order = sorted(of[many], key=lambda pod: pod.created, reverse=True)
            return [(pod, few) for pod in sorted(order, key=lambda pod: (pod.started, pod.ready))[:moves]]
    return []


def problem_of(pods: Collection[Pod]) -> str:
    """Return a text with the number of these pods that cannot run and the problem of the first one; empty if all can
    run.
    """
    stuck = [pod for pod in living(pods) if pod.problem]
    return f"{len(stuck)} of its pods cannot run: {stuck[0].problem}" if stuck else ""
