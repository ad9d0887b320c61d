"""The planner: from reports and objectives to decisions. It does no I/O and reads no clock.

A fast loop compares the workers that the present load needs with the workers that exist. A slow loop forecasts the
load, and its result is the lower limit for the fast loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.core.planner.actions import Action, Decision, Flip, Hold
from paceline.core.planner.memory import PlanningState, observe
from paceline.core.planner.moves import Moves
from paceline.core.planner.needs import Outlook, RoleNeed, assess, look_ahead
from paceline.core.planner.objectives import Objectives
from paceline.core.planner.reports import Report, Role
from paceline.core.planner.sizing import size


class Planner:
    """Decides how many workers of each role there should be.

    A decision depends only on the objectives, the state and the report.

    Args:
        objectives: the operator's objectives for the fleet.
        state: state of an earlier planner of this fleet. None: do not shrink the fleet before watching it for a while.
    """

    def __init__(self, objectives: Objectives, state: PlanningState | None = None) -> None:
        objectives.check()
        self.objectives = objectives
        self.state = state or PlanningState()

    def decide(self, report: Report) -> Decision:
        """Return the decision from this report, and update `state` for the next decision."""
        if self.state.at is not None and report.at <= self.state.at:
            return self._decision(report, [], ["this report is not newer than the last one"])
        outlook = Outlook(report, self.objectives, observe(self.state, report, self.objectives))
        if report.traffic_age > self.objectives.stale_seconds:
            self.state = outlook.state
            return self._decision(report, [], [f"the figures of gateways are {report.traffic_age:.0f} s old"])
        slow_at = outlook.state.slow_at
        if slow_at is None or report.at - slow_at >= self.objectives.slow_seconds:
            outlook = replace(outlook, state=look_ahead(outlook))
        needs = assess(outlook)
        targets = size(needs, outlook)
        outlook = replace(outlook, state=_remember(outlook.state, report, targets))
        self.state = outlook.state
        moves = Moves(outlook, needs, targets)
        moves.choose()
        return self._decision(report, moves.actions, moves.held or _describe_all(needs, targets, outlook))

    def _decision(self, report: Report, actions: list[Action], held: list[str]) -> Decision:
        wanted = {role: seen.wanted for role, seen in report.roles.items()}
        for action in actions:
            if isinstance(action, Flip):
                wanted[action.role] -= 1
                wanted[action.to] += 1
            elif not isinstance(action, Hold):
                wanted[action.role] = action.count
        chosen = tuple(actions) or (Hold("; ".join(held)),)
        line = "; ".join(_describe(action, report) for action in chosen)
        return Decision(report.at, report.revision, wanted, chosen, line, self.objectives.advisory)


def _remember(state: PlanningState, report: Report, targets: dict[Role, int]) -> PlanningState:
    """Return the state with the targets of this report."""
    roles = {role: state.role(role) for role in targets}
    return state.with_roles(
        {role: replace(roles[role], targets=(*roles[role].targets, (report.at, targets[role]))) for role in targets}
    )


def _describe_all(needs: Mapping[Role, RoleNeed], targets: Mapping[Role, int], outlook: Outlook) -> list[str]:
    """Return the state of every role, for a decision that changes nothing."""
    lines = []
    for role, need in needs.items():
        short = ""
        if targets[role] < need.least:
            is_held = outlook.limits(role).most == targets[role] < outlook.objectives.limits(role).most
            short = ", but more would share the same cores" if is_held else f", and has devices for {targets[role]}"
        lines.append(f"{role} has {outlook.report.roles[role].wanted}: {need.reason}{short}")
    return lines


def _describe(action: Action, report: Report) -> str:
    if isinstance(action, Hold):
        return f"hold: {action.reason}"
    if isinstance(action, Flip):
        return f"flip {action.worker} from {action.role} to {action.to} ({action.reason})"
    before = report.roles[action.role].wanted
    who = f" by {action.worker}" if action.kind == "drain" and action.worker else ""
    return f"{action.kind} {action.role} {before}->{action.count}{who} ({action.reason})"
