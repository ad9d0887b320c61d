"""From needs to targets: the limits of each role, what people have set, and the budget of devices."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.planner.budget import devices
from paceline.core.planner.needs import Need
from paceline.core.planner.objectives import Objectives
from paceline.core.planner.reports import Report, Role

_BETTER = 1.15
"""With too few devices, they are divided anew only if the role that lacks most gets this much more of its need."""


def size(needs: Mapping[Role, Need], report: Report, objectives: Objectives) -> dict[Role, int]:
    """Return the number of workers that each role should have. A role that a person has set keeps that number."""
    targets: dict[Role, int] = {}
    for role, need in needs.items():
        seen, limits = report.roles[role], objectives.limits(role)
        wanted = seen.wanted
        target = need.least if need.least > wanted else min(need.most, wanted)
        targets[role] = min(max(target, limits.least), limits.most) if seen.pinned is None else seen.pinned
    if objectives.budget is None or devices(targets, objectives) <= objectives.budget:
        return targets
    return _divide(targets, needs, report, objectives)


def _divide(
    targets: Mapping[Role, int], needs: Mapping[Role, Need], report: Report, objectives: Objectives
) -> dict[Role, int]:
    """Return targets within the budget, so that the role that lacks most lacks as little as possible.

    The present load of all roles comes first, then the reserves for the forecast, then workers that no load needs.
    """
    levels = [{role: need.now for role, need in needs.items()}, {role: need.least for role, need in needs.items()}]
    counts = {role: _floor(role, target, report, objectives) for role, target in targets.items()}
    for wishes in (levels[0], targets):
        aims = {role: min(wishes[role], target) for role, target in targets.items()}
        while lacking := [role for role in aims if counts[role] < aims[role] and _fits(counts, role, objectives)]:
            # Decode comes first among equals, because nothing is served without it.
            poorest = min(lacking, key=lambda role: (counts[role] / aims[role], role != "decode"))
            counts[poorest] += 1
    present = {role: report.roles[role].wanted for role in targets}
    is_full = devices(present, objectives) == devices(counts, objectives)
    is_allowed = all(_floor(role, target, report, objectives) <= present[role] for role, target in targets.items())
    if is_full and is_allowed and not any(_is_better(counts, present, wishes) for wishes in levels):
        return present
    return counts


def _fits(counts: Mapping[Role, int], role: Role, objectives: Objectives) -> bool:
    """Return whether the budget has room for one more worker of a role."""
    needed = devices(counts, objectives) + objectives.limits(role).devices
    return objectives.budget is None or needed <= objectives.budget


def _floor(role: Role, target: int, report: Report, objectives: Objectives) -> int:
    """Return the workers that a role has before the rest is divided: what a person has set, or the least."""
    pinned = report.roles[role].pinned
    return min(target, objectives.limits(role).least) if pinned is None else pinned


def _is_better(counts: Mapping[Role, int], present: Mapping[Role, int], wishes: Mapping[Role, int]) -> bool:
    """Return whether the role that lacks most would lack clearly less than with the workers that are present."""
    return _worst(counts, wishes) >= _BETTER * _worst(present, wishes)


def _worst(counts: Mapping[Role, int], wishes: Mapping[Role, int]) -> float:
    """Return the share of its wish that the role with the smallest share has, at most 1."""
    return min((min(1.0, counts[role] / wish) for role, wish in wishes.items() if wish), default=1.0)
