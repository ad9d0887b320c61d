"""The planner's actions. Each names the state that it leads to, so applying it twice has no further effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.core.planner.reports import Role


@dataclass(frozen=True, slots=True)
class Add:
    """Raise the number of workers of `role` to `count`."""

    role: Role
    count: int
    reason: str
    kind: Literal["add"] = "add"


@dataclass(frozen=True, slots=True)
class Drain:
    """Let a worker move its requests away and end. Its role then has `count` workers."""

    role: Role
    count: int
    worker: str
    """Id of the worker to drain, the one with the least loss; if empty, the platform chooses a worker of the role."""
    reason: str
    kind: Literal["drain"] = "drain"


@dataclass(frozen=True, slots=True)
class Flip:
    """Let a worker move its requests away and take the role `to`, in the same process and with the same weights."""

    worker: str
    role: Role
    """The worker's present role."""
    to: Role
    reason: str
    kind: Literal["flip"] = "flip"


@dataclass(frozen=True, slots=True)
class Hold:
    """Change nothing."""

    reason: str
    kind: Literal["hold"] = "hold"


Action = Add | Drain | Flip | Hold


@dataclass(frozen=True, slots=True)
class Decision:
    """The actions from one report."""

    at: float
    """Instant of the report, on the clock of `Report.at`, in seconds."""
    expects: str
    """Revision of the report. If the platform has another revision by now, somebody else has acted, and the platform
    must do nothing.
    """
    wanted: Mapping[Role, int]
    """Number of workers of every role after the actions."""
    actions: tuple[Action, ...]
    """At least one action; Hold is never combined with others. The platform carries out all actions or none."""
    line: str
    """The whole decision in one line, for logs and people."""
    advisory: bool = False
    """Whether the decision is only shown and not carried out."""
