"""The interface between the planner and a platform, which starts and stops workers: `paceline serve`, docker compose or
Kubernetes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from paceline.core.planner.reports import Role

Ability = Literal["choose", "flip", "spread"]
"""An ability that not every platform has: to end a worker by its id (`choose`), to give a worker another role (`flip`),
or to start a worker on a machine with free cores (`spread`)."""


class KnownWorker(NamedTuple):
    """A worker as its member in Redis describes it."""

    role: str
    drains: bool = False
    is_ready: bool = True


@dataclass(frozen=True, slots=True)
class PlatformRole:
    """The workers of one role, as the platform counts them."""

    wanted: int
    """Number of workers that the platform keeps running, including workers that are starting or cannot be placed."""
    running: int
    """Number of workers whose process or container runs, without draining workers."""
    draining: int = 0
    """Number of workers that are ending. They do not count in `wanted`."""
    given_up: int = 0
    """Number of workers, since the platform's start, that were given up because they kept ending. `wanted` was lowered
    by each of them.
    """


@dataclass(frozen=True, slots=True)
class PlatformState:
    """The fleet as its platform sees it at one moment."""

    roles: Mapping[Role, PlatformRole]
    """The roles that the platform can scale. A role that is left out stays as it is."""
    problems: Mapping[Role, str] = field(default_factory=dict)
    """For each role whose wanted workers cannot all run, the reason, such as a missing image or no free device."""


class Platform(Protocol):
    """A fleet that is scaled by calls. Every call may be repeated, because it names the wanted state and not a change.

    All methods raise UnavailableError if the platform does not answer, or refuses; its text says what to do. The
    planner tries again later.
    """

    name: str
    abilities: frozenset[Ability]

    def take_over(self) -> None:
        """Note that this planner acts from now on, and takes over the drains that the previous planner has begun."""

    async def state(self) -> PlatformState:
        """Return the numbers of wanted and of running workers of each role.

        The planner compares `wanted` with the number that it has asked for. A difference is a person's edit, which
        takes precedence.
        """

    async def scale(self, role: Role, wanted: int, victims: Sequence[str] = ()) -> None:
        """Keep `wanted` workers of a role from now on. Returns before they have started or ended.

        Args:
            wanted: number of workers, as in `PlatformRole.wanted`.
            victims: ids of the workers that shall end if there are too many, the first ones first. A worker that ends
                gets SIGTERM and the time that its drain may take. If they are too few, or the platform cannot choose,
                it ends workers by its own rule. Ids of workers that have ended are ignored.
        """

    async def flip(self, worker_id: str, role: Role) -> None:
        """Give a worker another role. Its process goes on. `wanted` of both roles changes by one.

        A worker that has the role already is left alone. Only platforms with the ability `flip` do this.
        """

    async def close(self) -> None:
        """Release the connections to the platform. Workers keep running."""
