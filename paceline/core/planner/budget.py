"""The devices of a fleet, and the limits of its roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.core.planner.objectives import Objectives, RoleLimits
from paceline.core.planner.reports import Report, Role


def devices(counts: Mapping[Role, int], objectives: Objectives) -> int:
    """Return the number of devices that `counts` workers of each role take."""
    return sum(count * objectives.limits(role).devices for role, count in counts.items())


def draining_devices(report: Report, objectives: Objectives) -> int:
    """Return the number of devices of draining workers. They are in use until these workers have ended."""
    return sum(objectives.limits(each.role).devices for each in report.workers if each.state == "draining")


def limits_of(role: Role, report: Report, objectives: Objectives) -> RoleLimits:
    """Return the limits of a role now. If its workers share cores, its upper limit is at most one worker, its lower
    limit, or its present target, whichever is larger.
    """
    limits, seen = objectives.limits(role), report.roles[role]
    if not seen.shares_cores:
        return limits
    return replace(limits, most=min(limits.most, max(1, limits.least, seen.wanted)))
