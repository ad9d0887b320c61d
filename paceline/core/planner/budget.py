"""The devices of a fleet, and the limits of its roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.core.planner.objectives import Objectives, RoleLimits
from paceline.core.planner.reports import Report, Role


def devices(counts: Mapping[Role, int], objectives: Objectives) -> int:
    """Return the devices that this many workers take."""
    return sum(count * objectives.limits(role).devices for role, count in counts.items())


def draining_devices(report: Report, objectives: Objectives) -> int:
    """Return the devices of workers that drain. They are in use until these workers have ended."""
    return sum(objectives.limits(each.role).devices for each in report.workers if each.state == "draining")


def limits_of(role: Role, report: Report, objectives: Objectives) -> RoleLimits:
    """Return the limits of a role now. If its workers share cores, it does not grow above one worker or its least."""
    limits, seen = objectives.limits(role), report.roles[role]
    if not seen.shares_cores:
        return limits
    return replace(limits, most=min(limits.most, max(1, limits.least, seen.wanted)))
