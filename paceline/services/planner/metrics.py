"""The metrics of the planner, which gateways export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from paceline.core.metrics import Family, Sample
from paceline.core.planner.actions import Decision
from paceline.core.planner.reports import Role

DECISIONS = Family("planner_decisions", "Actions that the planner has decided, by kind and role", has_role=False)
FAILURES = Family("planner_failures", "Ticks of the planner that failed, by what did not answer", has_role=False)
WANTED = Family("planner_wanted_workers", "Workers that the planner wants of each role", "gauge", has_role=False)
LEADS = Family("planner_leads", "Whether this planner holds the lease and acts", "gauge", has_role=False)
PINNED = Family("planner_pinned_roles", "Roles whose number of workers a person has set", "gauge", has_role=False)
AGE = Family("planner_report_age_seconds", "Age of the oldest figures of gateways", "gauge", has_role=False)


@dataclass(slots=True)
class PlannerMetrics:
    """Counters since the start, and the latest values."""

    actions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of actions since the start, by kind and role."""
    failures: Counter[str] = field(default_factory=Counter)
    wanted: Mapping[Role, int] = field(default_factory=dict)
    leads: bool = False
    pinned: int = 0
    report_age: float = 0.0

    def count(self, decision: Decision) -> None:
        self.wanted = decision.wanted
        for action in decision.actions:
            self.actions[action.kind, getattr(action, "role", "")] += 1

    def samples(self) -> Iterator[Sample]:
        """Yield all counters and latest values as metrics."""
        for (kind, role), count in sorted(self.actions.items()):
            name = f"{kind}_{role}" if role else kind
            yield Sample(f"decided_{name}", count, DECISIONS, {"action": kind, "worker_role": role})
        for what, count in sorted(self.failures.items()):
            yield Sample(f"failed_{what}", count, FAILURES, {"reason": what})
        for role, count in self.wanted.items():
            yield Sample(f"wanted_{role}", count, WANTED, {"worker_role": role})
        yield Sample("leads", self.leads, LEADS)
        yield Sample("pinned_roles", self.pinned, PINNED)
        yield Sample("report_age_seconds", round(self.report_age, 1), AGE)
