"""Guards: rules that forbid actions even if the load needs them. Each one returns its reason; "" if it forbids
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.core.planner.memory import STUCK, Change, is_fresh, missing, settle_seconds
from paceline.core.planner.needs import Outlook
from paceline.core.planner.reports import Role, WorkerReport

_MOST_RELAPSES = 4
"""Each relapse, up to this number, doubles the time before a role shrinks again. So two planners with different
memories stop undoing each other's drains, and a fleet between two sizes comes to rest at the larger one.
"""


@dataclass(frozen=True, slots=True)
class Guards:
    """The guards for the decision from one report."""

    outlook: Outlook

    def growing(self, role: Role) -> str:
        """Return why a role must not grow; empty if it may."""
        seen = self.outlook.report.roles[role]
        is_ordered = seen.pinned is not None or seen.wanted < self.outlook.objectives.limits(role).least
        if is_ordered or (self.outlook.waiting and not seen.wanted):
            return ""
        return self._reversal(role, self.outlook.state.role(role).shrunk, 1.0)

    def shrinking(self, role: Role, is_urgent: bool = False) -> str:
        """Return why a role must not shrink, by a drain or by a flip; empty if it may.

        Args:
            is_urgent: whether another role needs the worker for its present load. Relapses then do not count, because
                they only protect workers that no other role needs.
        """
        report, state = self.outlook.report, self.outlook.state
        if lost := missing(report, self.outlook.objectives):
            return lost
        if self._is_changing(role):
            return f"{role} workers start or drain"
        if report.roles[role].pinned is not None:
            return ""
        if (left := settle_seconds(report.roles[role]) - (report.at - state.since)) > 0:
            return f"it has been watched too shortly, {left:.0f} s are left"
        memory = state.role(role)
        is_certain = is_urgent or self.outlook.is_idle or self._nothing_is_served()
        relapses = 0 if is_certain else min(memory.relapses, _MOST_RELAPSES)
        return self._reversal(role, memory.grown, 2.0**relapses)

    def leaving(self, worker: WorkerReport, others: list[WorkerReport], wanted: int) -> str:
        """Return why this worker must not leave its role if `others` are the workers that stay; empty if it may.

        The requests of a worker that leaves go on elsewhere. Without another worker, they would end.

        Args:
            wanted: number of workers that the role is to have afterwards. Some of them may not serve yet.
        """
        if worker.state == "starting":
            return ""
        if not is_fresh(worker, self.outlook.objectives):
            return f"{worker.worker} has not reported"
        others = [each for each in others if each.state == "ready" and is_fresh(each, self.outlook.objectives)]
        has_work = bool(worker.running or worker.waiting or worker.queued_tokens)
        if not others and (wanted > 0 or has_work or (worker.role != "encode" and not self.outlook.is_idle)):
            return f"{worker.worker} is the last ready {worker.role} worker"
        if worker.role == "decode" and has_work:
            places = sum(each.max_seqs - each.running for each in others)
            # KV in shared memory need not be moved.
            stays = worker.shares_memory and any(each.shares_memory for each in others)
            memory = math.inf if stays else sum(1 - each.kv_pressure for each in others)
            if worker.running + worker.waiting > places or worker.kv_pressure > memory:
                return f"the other decode workers have no room for the requests of {worker.worker}"
        return ""

    def _nothing_is_served(self) -> bool:
        """Return whether requests wait and a role has no worker, perhaps because others have all devices."""
        roles = self.outlook.report.roles
        return bool(self.outlook.waiting) and any(not seen.wanted for role, seen in roles.items() if role != "encode")

    def _is_changing(self, role: Role) -> bool:
        """Return whether workers of a role are starting or draining, not counting starts and drains that are stuck."""
        report, memory = self.outlook.report, self.outlook.state.role(role)
        seen = report.roles[role]
        for each in report.workers:
            if each.role == role and each.state == "draining" and each.state_seconds < STUCK * seen.drain_seconds:
                return True
        if len(self.outlook.workers(role)) > seen.wanted:
            return True
        return memory.short_since is not None and not self.is_stuck(role)

    def is_stuck(self, role: Role) -> bool:
        """Return whether wanted workers have been missing for so long that they will probably never start."""
        since = self.outlook.state.role(role).short_since
        seen = self.outlook.report.roles[role]
        return since is not None and self.outlook.report.at - since >= STUCK * seen.startup_seconds

    def _reversal(self, role: Role, change: Change | None, patience: float) -> str:
        """Return why the change must not be reversed yet; empty if it was long ago, or if the load has changed.

        Args:
            patience: factor on the time that counts as long.
        """
        if change is None:
            return ""
        age = self.outlook.report.at - change.at
        quiet = patience * settle_seconds(self.outlook.report.roles[role])
        load = self.outlook.state.load
        if age >= quiet or (load is not None and change.load is not None and load.differs(change.load, role)):
            return ""
        return f"the last change of {role} is {age:.0f} s old, and the load is the same"
