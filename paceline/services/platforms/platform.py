"""The interface between the planner and what starts and stops workers: `paceline serve`, docker compose, Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from paceline.core.planner.reports import Role

Ability = Literal["choose", "flip", "spread"]
"""Abilities that not every platform has: end a worker by its id (`choose`), give a worker another role (`flip`), and
start a worker on a machine with free cores (`spread`)."""


class KnownWorker(NamedTuple):
    """A worker as Redis knows it."""

    role: str
    drains: bool = False
    is_ready: bool = True


@dataclass(frozen=True, slots=True)
class PlatformRole:
    """The workers of one role, as the platform counts them."""

    wanted: int
    """Workers that the platform keeps running, those that are starting or cannot be placed included."""
    running: int
    """Workers whose process or container runs, without those that drain."""
    draining: int = 0
    """Workers that are ending. They are not among `wanted`."""
    given_up: int = 0
    """Workers that kept ending, so that the platform wants that many fewer now. A total since the platform's start."""


@dataclass(frozen=True, slots=True)
class PlatformState:
    """The fleet as its platform sees it at one moment."""

    roles: Mapping[Role, PlatformRole]
    """The roles that the platform can scale. A role that is left out stays as it is."""
    problems: Mapping[Role, str] = field(default_factory=dict)
    """For each role whose wanted workers cannot all run, the reason: no device is free, an image is missing."""


class Platform(Protocol):
    """A fleet that is scaled by calls. Every call may be repeated: it says what shall be, and not what changes.

    All methods raise UnavailableError if the platform does not answer, or refuses; its text says what to do. The
    planner tries again later.
    """

    name: str
    abilities: frozenset[Ability]

    def take_over(self) -> None:
        """Note that this planner acts from now on, so that drains of the planner before it are this one's."""

    async def state(self) -> PlatformState:
        """Return how many workers of each role are wanted and running.

        The planner compares `wanted` with what it has asked for. A difference is the edit of a person, which wins.
        """

    async def scale(self, role: Role, wanted: int, victims: Sequence[str] = ()) -> None:
        """Keep `wanted` workers of a role from now on. Returns before they have started or ended.

        Args:
            wanted: number of workers, as in `PlatformRole.wanted`.
            victims: ids of the workers that shall end if there are too many, the first ones first. A worker that ends
                gets SIGTERM and the time that its drain may take. If these are not enough, or the platform cannot
                choose, it ends workers by its own rule. Ids of workers that have ended are ignored.
        """

    async def flip(self, worker_id: str, role: Role) -> None:
        """Give a worker another role. Its process goes on. `wanted` of both roles changes by one.

        A worker that has the role already is left alone. Only platforms with the ability `flip` do this.
        """

    async def close(self) -> None:
        """Release connections. Workers keep running."""
