"""The planner: from reports and objectives to decisions. It does no I/O and reads no clock."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.planner.actions import Decision, Hold
from paceline.core.planner.objectives import Objectives
from paceline.core.planner.reports import Report


@dataclass(frozen=True, slots=True)
class PlannerState:
    """Everything that a planner remembers between two reports. `codec.to_json` writes it, `codec.from_json` reads it."""


class Planner:
    """Decides how many workers of each role there should be.

    Args:
        objectives: what the operator wants.
        state: what an earlier planner of this fleet remembered; None if there was none. Without it, the planner
            holds until it has watched the fleet.
    """

    def __init__(self, objectives: Objectives, state: PlannerState | None = None) -> None:
        self.objectives = objectives
        self.state = state or PlannerState()

    def decide(self, report: Report) -> Decision:
        """Return the decision from this report, and remember in `state` what the next one needs."""
        wanted = {role: seen.wanted for role, seen in report.roles.items()}
        reason = "the planner does not decide yet"
        return Decision(report.at, report.revision, wanted, (Hold(reason),), f"hold: {reason}")
