"""The planner's actions. Each one names the state that it leads to, so that to apply it twice changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.core.planner.reports import Role


@dataclass(frozen=True, slots=True)
class Add:
    """Have `count` workers of `role`, which is more than before."""

    role: Role
    count: int
    reason: str
    kind: Literal["add"] = "add"


@dataclass(frozen=True, slots=True)
class Drain:
    """Let a worker move its work away and end, after which its role has `count` workers."""

    role: Role
    count: int
    worker: str
    """The worker with the least loss; empty lets the platform choose one of the role."""
    reason: str
    kind: Literal["drain"] = "drain"


@dataclass(frozen=True, slots=True)
class Flip:
    """Let a worker move its work away and go on in the role `to`, in the same process and with the same weights."""

    worker: str
    role: Role
    """The role that it has now."""
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
    """Instant of the report."""
    expects: str
    """Revision of the report. If the platform has another one by now, it must do nothing: somebody else has acted."""
    wanted: Mapping[Role, int]
    """Number of workers of every role after the actions."""
    actions: tuple[Action, ...]
    """At least one; Hold stands alone. They are carried out together or not at all."""
    line: str
    """The whole decision in one line, for logs and people."""
    advisory: bool = False
    """Whether nobody is to carry this out."""
