"""An operator's objectives for a fleet: the limits of its roles, and the devices that its workers take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.core.errors import ConfigError
from paceline.core.planner.reports import ROLES, Report, Role
from paceline.core.request_classes import BACKGROUND, DEFAULT, Classes


@dataclass(frozen=True, slots=True)
class Latency:
    """Objectives of one class of requests. The share `percentile` of its requests must meet them."""

    ttft: float | None = None
    """Largest time to first token, in seconds; None if there is no objective."""
    itl: float | None = None
    """Largest time between two tokens, in seconds; None if there is no objective."""
    percentile: float = 0.95


def class_latencies(classes: Classes, share: float) -> dict[str, Latency]:
    """Return the objectives of each class by its name. The class of batches has no objectives.

    Args:
        classes: the classes of --classes-file.
        share: `percentile` of the class of batches, which needs a value although this class has no objectives.
    """
    found = {
        name: Latency(each.ttft_seconds, each.itl_seconds, each.percentile)
        for name, each in classes.items()
        if name not in (DEFAULT, BACKGROUND) or each.ttft_seconds or each.itl_seconds
    }
    return {BACKGROUND: Latency(None, None, share), **found}


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """The least and the largest number of workers of one role, and the number of devices that each worker takes."""

    least: int = 0
    most: int = 64
    devices: int = 1
    """Number of the budget's devices that one worker takes."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """The objectives of every class, the limits of every role, and the times after which the planner acts."""

    classes: Mapping[str, Latency] = field(default_factory=dict)
    """Objectives by name of the class. A class that is missing has the objectives of `default`."""
    default: Latency = Latency(ttft=2.0, itl=0.1)
    roles: Mapping[Role, RoleLimits] = field(default_factory=dict)
    """Limits of each role. A role without an entry has no workers."""
    budget: int | None = None
    """Largest number of devices that all workers take together, draining ones included; None is no limit."""
    advisory: bool = False
    """Whether decisions are only shown and not carried out."""
    flips: bool = True
    """Whether workers may change their role."""
    fast_seconds: float = 5.0
    """Time between two decisions from measured load, in seconds."""
    slow_seconds: float = 60.0
    """Time between two forecasts, in seconds. Fast decisions keep the workers that the newest forecast needs. A worker
    drains only if neither of the last two forecasts needs it.
    """
    idle_seconds: float = 300.0
    """Seconds without a request after which the last workers of a role may leave."""
    stale_seconds: float = 15.0
    """A report that is older than this many seconds counts as lost. The fleet does not shrink while a report is
    lost.
    """

    def limits(self, role: Role) -> RoleLimits:
        """Return the limits of a role. A role without limits has no workers."""
        return self.roles.get(role, RoleLimits(0, 0))

    def latency(self, name: str) -> Latency:
        """Return the objectives of the class with this name."""
        return self.classes.get(name, self.default)

    def check(self) -> None:
        """Raise ConfigError if these objectives contradict each other or name something unknown."""
        for name, latency in (("default", self.default), *self.classes.items()):
            if not 0 < latency.percentile < 1:
                raise ConfigError(f"class {name}: the percentile must be between 0 and 1, such as 0.95")
            if any(limit is not None and not limit > 0 for limit in (latency.ttft, latency.itl)):
                raise ConfigError(f"class {name}: TTFT and ITL must be above 0 seconds")
        for role, limits in self.roles.items():
            if role not in ROLES:
                raise ConfigError(f"there is no role {role}; roles are {', '.join(ROLES)}")
            if not 0 <= limits.least <= limits.most or limits.devices < 0:
                raise ConfigError(f"{role}: 0 <= least <= most must hold, and devices must not be negative")
        # A fleet has pool workers, or workers of the other roles.
        least = max(
            sum(each.least * each.devices for role, each in self.roles.items() if (role == "pool") is is_pool)
            for is_pool in (False, True)
        )
        if self.budget is not None and least > self.budget:
            raise ConfigError(f"the least workers of all roles take {least} devices, the budget has {self.budget}")


def devices(counts: Mapping[Role, int], objectives: Objectives) -> int:
    """Return the number of devices that `counts` workers of each role take."""
    return sum(count * objectives.limits(role).devices for role, count in counts.items())


def draining_devices(report: Report, objectives: Objectives) -> int:
    """Return the number of devices of draining workers. The devices are in use until these workers have ended."""
    return sum(objectives.limits(each.role).devices for each in report.workers if each.state == "draining")


def limits_of(role: Role, report: Report, objectives: Objectives) -> RoleLimits:
    """Return the limits of a role now. If its workers share cores, the upper limit is at most the largest of one
    worker, the lower limit and the present target.
    """
    limits, seen = objectives.limits(role), report.roles[role]
    if not seen.shares_cores:
        return limits
    return replace(limits, most=min(limits.most, max(1, limits.least, seen.wanted)))
