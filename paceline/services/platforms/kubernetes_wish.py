"""The wanted numbers of workers, read from and written to the objects of the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.planner.reports import Role

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wish:
    """The wanted numbers of prefill and decode workers. They are kept in the ConfigMap `roles`.

    The Deployment `worker` has only their sum as its replicas. A change is first written to the ConfigMap and then to
    the Deployment. If the second write is missing, `before` distinguishes this from a change by a person.
    """

    prefill: int
    decode: int
    before: int | None = None
    """Number of replicas before the change that is under way; None if there is no such change."""

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def with_role(self, role: Role, count: int, replicas: int) -> Wish:
        """Return a wish with `count` workers of a role. `replicas` is the number that the Deployment has before this
        change.
        """
        new = Wish(count, self.decode) if role == "prefill" else Wish(self.prefill, count)
        return new if new.total == replicas else replace(new, before=replicas)

    def to_data(self) -> dict[str, str | None]:
        """Return the wish as data of the ConfigMap. A value of None removes its key."""
        before = None if self.before is None else str(self.before)
        return {"prefill": str(self.prefill), "decode": str(self.decode), "before": before}


def read_wish(roles: Json, replicas: int) -> Wish:
    """Return the wanted numbers of prefill and decode workers.

    Args:
        roles: the ConfigMap `roles`. Without data, all workers decode.
        replicas: number of replicas of the Deployment `worker`. If a person has changed them, the number of decode
            workers changes. The last pod decodes, because nothing is served without a decode worker.
    """
    prefill, decode, before = (_number(roles, name) for name in ("prefill", "decode", "before"))
    wish = Wish(prefill or 0, decode or 0, before)
    if replicas in (wish.total, before):
        return wish
    prefill = min(wish.prefill, max(0, replicas - 1))
    return Wish(prefill, replicas - prefill)


def _number(roles: Json, name: str) -> int | None:
    text = str((roles.get("data") or {}).get(name, ""))
    return int(text) if text.isdecimal() else None


def replicas_of(deployment: Json) -> int:
    """Return the number of pods that a Deployment, or its scale, should have."""
    return int(deployment["spec"].get("replicas", 1 if deployment.get("kind") == "Deployment" else 0))


def is_rolling(deployment: Json) -> bool:
    """Return whether pods of an earlier version are being replaced. Meanwhile the costs of pods have no effect."""
    status = deployment.get("status") or {}
    seen = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    return not seen or status.get("updatedReplicas", 0) < status.get("replicas", 0)


def failure_of(deployment: Json) -> str:
    """Return why no pods can be made, for example because of a quota; empty if they can."""
    for condition in (deployment.get("status") or {}).get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return str(condition.get("message", ""))
    return ""
