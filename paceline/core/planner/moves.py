"""Actions for targets: flips if one role has too many workers and another too few, then drains and starts."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.core.planner.actions import Action, Add, Drain, Flip
from paceline.core.planner.guards import Guards
from paceline.core.planner.memory import settle_seconds
from paceline.core.planner.needs import Outlook, RoleNeed
from paceline.core.planner.objectives import devices, draining_devices
from paceline.core.planner.reports import Role, WorkerReport

_FLIP_REPORTS = 2.5
"""A worker flips only if its role has not needed it for this multiple of `fast_seconds`. Drains wait longer."""
_SHARE = 8
"""At most one in this many workers of a role leaves by one decision, so that its requests find places before others
leave.
"""


@dataclass
class Moves:
    """The actions of one decision, while they are chosen."""

    outlook: Outlook
    needs: Mapping[Role, RoleNeed]
    targets: Mapping[Role, int]
    wanted: dict[Role, int] = field(default_factory=dict)
    """Number of workers of every role after the actions so far."""
    actions: list[Action] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    """Reasons why the fleet differs from its targets after these actions."""

    def __post_init__(self) -> None:
        self._guards = Guards(self.outlook)
        self.wanted = {role: seen.wanted for role, seen in self.outlook.report.roles.items()}
        self._staying = {role: [e for e in self.outlook.report.workers if e.role == role] for role in self.wanted}
        self._shrinks = dict.fromkeys(self.wanted, 0)

    def choose(self) -> None:
        """Choose the actions of this decision, role by role: which workers to start, drain, flip or keep."""
        lacking = {role: self.targets[role] - self.wanted[role] for role in self.wanted}
        coming = {role: self._flip_into(role, lack) for role, lack in lacking.items() if lack > 0}
        for role in self.wanted:
            self._drain(role)
        # Without a worker of some role, nothing is served, so a role without workers comes first. Then come roles that
        # have lent workers, so that no other role takes the budget for their replacements.
        for role in sorted(self.wanted, key=lambda role: (self.wanted[role] > 0, role in coming)):
            self._add(role, coming.get(role, 0))

    def _flip_into(self, role: Role, lack: int) -> int:
        """Flip workers of other roles into this one. Return the number of further workers that will flip soon."""
        if self._refuses(self._guards.growing(role), role, "grow"):
            return 0
        soon = 0
        for source in self.wanted:
            surplus = min(lack, max(0, self.wanted[source] - self.targets[source]))
            lent = min(lack - surplus, self._lent(source, role))
            if source == role or surplus + lent <= 0 or not self._can_flip(source, role):
                continue
            if self._may_not_shrink(source, role):
                continue
            # Without a worker of this role, nothing is served, so it does not wait until the others were watched.
            watched = _FLIP_REPORTS * self.outlook.objectives.fast_seconds
            sure = self.wanted[source] - self._highest(source, watched) if self.wanted[role] else surplus
            flipped = self._flip(source, role, min(surplus, max(0, sure)) + lent)
            lack -= flipped
            soon += max(0, surplus - flipped)  # a worker is lent in this decision or not at all
        # Without a worker of this role, nothing is served, so it does not wait for later flips.
        return soon if self.wanted[role] else 0

    def _flip(self, source: Role, role: Role, count: int) -> int:
        """Flip up to `count` workers from one role to another. Return how many may leave now."""
        for flipped in range(count):
            worker = self._victim(source, role)
            if worker is None:
                return flipped
            reason = f"{self._reason(role)}; {source}: {self.needs[source].reason}"
            self.actions.append(Flip(worker.worker, source, role, reason))
            self._staying[source].remove(worker)
            self._shrinks[source] += 1
            self.wanted[source] -= 1
            self.wanted[role] += 1
        return count

    def _lent(self, source: Role, role: Role) -> int:
        """Return the number of workers that flip to a role which lacks them now, from a role that needs them only
        later.

        The same decision starts new workers to replace them: these are ready in time for the forecast, but too late for
        `role`.
        """
        report, objectives = self.outlook.report, self.outlook.objectives
        lacking = self.needs[role].now - self.wanted[role]
        present = min(self.wanted[source], self.targets[source])
        spare = present - max(self.needs[source].now, objectives.limits(source).least)
        count = min(lacking, spare, self._room(source))
        if count <= 0 or report.roles[source].pinned is not None or self._guards.growing(source):
            return 0
        return count

    def _drain(self, role: Role) -> None:
        """Drain workers that have not been needed for as long as targets are remembered.

        A number that a person has set counts at once. Forecasts do not have to agree if there are no requests, or if
        another role lacks the worker now.
        """
        seen = self.outlook.report.roles[role]
        watched = settle_seconds(seen) if self.outlook.is_idle or self._is_urgent(role, None) else math.inf
        highest = self._highest(role, watched) if seen.pinned is None else seen.pinned
        surplus = self.wanted[role] - max(self.targets[role], highest)
        for _ in range(surplus):
            worker = self._victim(role, None)
            if worker is None:
                break
            self.wanted[role] -= 1
            self._shrinks[role] += 1
            if worker in self._staying[role]:
                self._staying[role].remove(worker)
            self.actions.append(Drain(role, self.wanted[role], worker.worker, self.needs[role].reason))

    def _add(self, role: Role, expected: int) -> None:
        """Start workers, except for those that flips bring soon, and within the budget."""
        count = self.targets[role] - self.wanted[role] - expected
        if count <= 0 or self._refuses(self._guards.growing(role), role, "grow"):
            return
        count = min(count, self._room(role))
        if count <= 0:
            self._hold(f"{role} has {self.wanted[role]}: needs {self.needs[role].least}, but the budget has no room")
            return
        self.wanted[role] += count
        self.actions.append(Add(role, self.wanted[role], self._reason(role)))

    def _room(self, role: Role) -> int:
        """Return the number of workers of a role for which the budget still has devices."""
        budget, each = self.outlook.objectives.budget, self.outlook.objectives.limits(role).devices
        return sys.maxsize if budget is None or not each else (budget - self._devices_in_use()) // each

    def _devices_in_use(self) -> int:
        """Return the number of devices of all workers after the actions so far, draining workers included."""
        objectives = self.outlook.objectives
        leaving = sum(objectives.limits(act.role).devices for act in self.actions if isinstance(act, Drain))
        return devices(self.wanted, objectives) + draining_devices(self.outlook.report, objectives) + leaving

    def _can_flip(self, source: Role, role: Role) -> bool:
        """Return whether workers of `source` can take the role, and would be ready sooner than new workers."""
        seen, budget = self.outlook.report.roles, self.outlook.objectives.budget
        each = self.outlook.objectives.limits(role).devices
        is_full = budget is not None and self._devices_in_use() + each > budget
        start = seen[role].startup_seconds + is_full * seen[source].drain_seconds
        return (
            self.outlook.objectives.flips
            and seen[source].pinned is None
            and seen[role].pinned is None
            and self.outlook.objectives.limits(source).devices == each
            and seen[source].flip_seconds < start
            and any(role in each.flips_to for each in self._staying[source])
        )

    def _highest(self, role: Role, seconds: float) -> int:
        """Return the largest target of a role in this time, as far as targets are remembered."""
        first = self.outlook.report.at - seconds
        return max((target for at, target in self.outlook.state.role(role).targets if at >= first), default=0)

    def _victim(self, role: Role, to: Role | None) -> WorkerReport | None:
        """Return the worker that leaves a role with the least loss; None if none may leave now."""
        if self._may_not_shrink(role, to):
            return None
        most = max(1, self.outlook.report.roles[role].wanted // _SHARE)
        if self._shrinks[role] >= most and not self.outlook.is_idle:
            self._hold(f"{role} shrinks slowly")
            return None
        staying = self._staying[role]
        present = [each for each in staying if each.state != "draining"]
        if to is None and self._guards.is_stuck(role) and len(present) <= self.wanted[role] - 1:
            # The platform could not start this worker, so only the request for it is withdrawn.
            return WorkerReport("", role, state="starting")
        refusals = []
        for worker in sorted(present, key=lambda each: (each.state == "ready", each.loss, each.running, each.worker)):
            if to is not None and (to not in worker.flips_to or worker.state != "ready"):
                continue
            others = [each for each in present if each is not worker]
            refusal = self._guards.leaving(worker, others, self.wanted[role] - 1)
            if not refusal:
                return worker
            refusals.append(refusal)
        if refusals:
            self._hold(refusals[0])
        return None

    def _reason(self, role: Role) -> str:
        """Return why a role gets workers."""
        if (pinned := self.outlook.report.roles[role].pinned) is not None:
            return f"a person has set {pinned}"
        is_more = self.targets[role] > max(self.needs[role].least, self.outlook.objectives.limits(role).least)
        return self.needs[role].reason + ", and gets devices that are left" * is_more

    def _may_not_shrink(self, role: Role, to: Role | None) -> bool:
        """Return whether no worker may leave a role, either for the role `to` or, if that is None, to end."""
        return self._refuses(self._guards.shrinking(role, self._is_urgent(role, to)), role, "shrink")

    def _is_urgent(self, role: Role, to: Role | None) -> bool:
        """Return whether another role needs a worker that leaves this role for its present load.

        Args:
            to: the role that the worker takes; None if it ends, so that its devices are free for any role.
        """
        takers = [to] if to else [other for other in self.wanted if other != role and self._room(other) <= 0]
        return any(min(self.needs[taker].now, self.outlook.limits(taker).most) > self.wanted[taker] for taker in takers)

    def _refuses(self, reason: str, role: Role, what: str) -> bool:
        if reason:
            self._hold(f"{role} may not {what}: {reason}")
        return bool(reason)

    def _hold(self, reason: str) -> None:
        if reason not in self.held:
            self.held.append(reason)
