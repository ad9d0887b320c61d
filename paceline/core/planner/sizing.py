"""Targets for the needs of roles. They keep the limits of each role, the budget of devices, and the numbers that people
have set.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from paceline.core.planner.capacity import Wanted
from paceline.core.planner.needs import Outlook, RoleNeed, by_load, intervals_ahead
from paceline.core.planner.objectives import Objectives, devices
from paceline.core.planner.reports import Role

_BETTER = 1.15
"""Scarce devices are divided anew only if the smallest headroom of a role becomes at least this many times as large."""

_SCALES = tuple(1.05**step for step in range(-28, 28))
"""Multiples of a load that are tried to find a role's headroom, from 0.26 to 3.7."""

Counts = Mapping[Role, int]
"""Number of workers of every role."""


def size(needs: Mapping[Role, RoleNeed], outlook: Outlook) -> dict[Role, int]:
    """Return the number of workers that each role should have. A role that a person has set keeps that number."""
    report, objectives = outlook.report, outlook.objectives
    targets: dict[Role, int] = {}
    for role, need in needs.items():
        seen, limits = report.roles[role], outlook.limits(role)
        wanted = seen.wanted
        target = need.least if need.least > wanted else min(need.most, wanted)
        targets[role] = min(max(target, limits.least), limits.most) if seen.pinned is None else seen.pinned
    if objectives.budget is None or devices(targets, objectives) < objectives.budget:
        return targets
    return _divide(targets, needs, outlook)


def _divide(targets: Counts, needs: Mapping[Role, RoleNeed], outlook: Outlook) -> dict[Role, int]:
    """Return numbers of workers that use the whole budget, and that give all roles about the same headroom.

    The present load comes before the forecast, because devices change roles more quickly than loads change. Numbers
    that people have set stay, and so do the targets of roles that take no devices.
    """
    report, objectives = outlook.report, outlook.objectives

    @cache
    def room(role: Role, workers: int) -> _Headroom:
        return _headroom(role, needs[role], outlook, workers)

    free = [role for role, seen in report.roles.items() if seen.pinned is None and objectives.limits(role).devices]
    counts = {
        role: min(target, objectives.limits(role).least) if role in free else target for role, target in targets.items()
    }
    growing = [role for role in free if needs[role].least]
    while growing:
        # Decode comes first among equals, because nothing is served without it.
        poorest = min(growing, key=lambda role: (room(role, counts[role]), role != "decode"))
        if counts[poorest] < outlook.limits(poorest).most and _fits(counts, poorest, objectives):
            counts[poorest] += 1
        else:
            growing.remove(poorest)
    kept = {role: report.roles[role].wanted if role in free else target for role, target in targets.items()}
    is_allowed = all(
        objectives.limits(role).least
        <= kept[role]
        <= (outlook.limits(role).most if needs[role].least else counts[role])
        for role in free
    )
    changed = [role for role in free if kept[role] != counts[role]]
    if not is_allowed or devices(kept, objectives) != devices(counts, objectives) or not changed:
        return counts
    before, after = ([room(role, each[role]) for role in changed] for each in (kept, counts))
    is_better = min(each.present for each in after) >= _BETTER * min(each.present for each in before)
    is_safer = min(each.forecast for each in after) >= _BETTER * min(each.forecast for each in before)
    return counts if is_better or is_safer else kept


@dataclass(frozen=True, slots=True, order=True)
class _Headroom:
    """Multiples of a role's load for which it has enough workers."""

    present: float
    """Multiple of the present load, at most 1, because everything above 1 is a reserve."""
    forecast: float
    """Multiple of the present load or of the forecast load, whichever is larger."""


def _headroom(role: Role, need: RoleNeed, outlook: Outlook, workers: int) -> _Headroom:
    """Return the headroom of a role that has a need, with this many workers."""
    memory = outlook.state.role(role)
    times = memory.times
    if times is None:
        # The reserve that such a role needs is unknown. If it got one, its need would become that larger number.
        return _Headroom(min(1.0, workers / need.now), _SCALES[-1] if workers >= need.least else workers / need.least)

    def largest(loads: Sequence[list[Wanted]]) -> float:
        def needed(scale: float) -> float:
            return max(
                need.backlog * scale, *(by_load(role, load, times, outlook, memory.boost * scale) for load in loads)
            )

        first = bisect_left(_SCALES, True, key=lambda scale: needed(scale) > workers + 1e-6)
        return _SCALES[first - 1] if first else _SCALES[0] * workers / needed(_SCALES[0])

    now, expected = outlook.now(), outlook.expected(intervals_ahead(outlook))
    return _Headroom(min(1.0, largest([now])), largest([now, expected]))


def _fits(counts: Counts, role: Role, objectives: Objectives) -> bool:
    """Return whether the budget has room for one more worker of a role."""
    needed = devices(counts, objectives) + objectives.limits(role).devices
    return objectives.budget is None or needed <= objectives.budget
