"""The devices of a fleet."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.planner.objectives import Objectives
from paceline.core.planner.reports import Report, Role


def devices(counts: Mapping[Role, int], objectives: Objectives) -> int:
    """Return the devices that this many workers take."""
    return sum(count * objectives.limits(role).devices for role, count in counts.items())


def draining_devices(report: Report, objectives: Objectives) -> int:
    """Return the devices of workers that drain. They are in use until these workers have ended."""
    return sum(objectives.limits(each.role).devices for each in report.workers if each.state == "draining")
