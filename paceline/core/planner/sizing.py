"""From needs to targets: the limits of each role, what people have set, and the budget of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.planner.budget import devices
from paceline.core.planner.needs import Need, Outlook, workers_for
from paceline.core.planner.objectives import Objectives
from paceline.core.planner.reports import Report, Role

_BETTER = 1.15
"""Scarce devices are divided anew only if one of two figures becomes at least this many times as large: the smallest
share that a role has of its present need, or the multiple of the load for which all roles have enough workers."""
_SCALES = tuple(step / 20 for step in range(10, 31))
"""Multiples of the load for which scarce devices are divided, one after the other."""

Counts = Mapping[Role, int]
"""Number of workers of every role."""


def size(needs: Mapping[Role, Need], outlook: Outlook) -> dict[Role, int]:
    """Return the number of workers that each role should have. A role that a person has set keeps that number."""
    report, objectives = outlook.report, outlook.objectives
    targets: dict[Role, int] = {}
    for role, need in needs.items():
        seen, limits = report.roles[role], objectives.limits(role)
        wanted = seen.wanted
        target = need.least if need.least > wanted else min(need.most, wanted)
        targets[role] = min(max(target, limits.least), limits.most) if seen.pinned is None else seen.pinned
    if objectives.budget is None or devices(targets, objectives) <= objectives.budget:
        return targets
    return _divide(targets, needs, outlook)


def _divide(targets: Counts, needs: Mapping[Role, Need], outlook: Outlook) -> dict[Role, int]:
    """Return targets within the budget, so that the role that lacks most lacks as little as possible.

    The present load of all roles comes first. Then all roles get what the same multiple of their loads needs, for one
    of `_SCALES` after the other, while there are devices. Reserves for forecasts count from the multiple 1 on, and not
    before, because devices change roles more quickly than loads change.
    """
    report, objectives = outlook.report, outlook.objectives
    now = {role: need.now for role, need in needs.items()}
    later = [{role: workers_for(role, need, outlook, scale) for role, need in needs.items()} for scale in _SCALES]
    counts = {role: _floor(role, target, report, objectives) for role, target in targets.items()}
    for wishes in (now, *later, targets):
        aims = {role: min(wishes[role], target) for role, target in targets.items()}
        while lacking := [role for role in aims if counts[role] < aims[role] and _fits(counts, role, objectives)]:
            # Decode comes first among equals, because nothing is served without it.
            poorest = min(lacking, key=lambda role: (counts[role] / aims[role], role != "decode"))
            counts[poorest] += 1
    present = {role: report.roles[role].wanted for role in targets}
    is_full = devices(present, objectives) == devices(counts, objectives)
    is_allowed = all(_floor(role, target, report, objectives) <= present[role] for role, target in targets.items())
    is_better = _share(counts, now) >= _BETTER * _share(present, now)
    is_safer = _scale(counts, later) >= _BETTER * _scale(present, later)
    if is_full and is_allowed and not is_better and not is_safer:
        return present
    return counts


def _fits(counts: Counts, role: Role, objectives: Objectives) -> bool:
    """Return whether the budget has room for one more worker of a role."""
    needed = devices(counts, objectives) + objectives.limits(role).devices
    return objectives.budget is None or needed <= objectives.budget


def _floor(role: Role, target: int, report: Report, objectives: Objectives) -> int:
    """Return the workers that a role has before the rest is divided: what a person has set, or the least."""
    pinned = report.roles[role].pinned
    return min(target, objectives.limits(role).least) if pinned is None else pinned


def _share(counts: Counts, wishes: Counts) -> float:
    """Return the share of its wish that the role with the smallest share has, at most 1."""
    return min((min(1.0, counts[role] / wish) for role, wish in wishes.items() if wish), default=1.0)


def _scale(counts: Counts, later: Sequence[Counts]) -> float:
    """Return the largest of `_SCALES` for which all roles have enough workers.

    If there is none, return the smallest one times the smallest share that a role has of its workers for it.
    """
    enough = [scale for scale, wishes in zip(_SCALES, later) if _share(counts, wishes) == 1.0]
    return max(enough, default=_SCALES[0] * _share(counts, later[0]))
