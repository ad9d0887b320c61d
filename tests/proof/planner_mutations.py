"""Mutations of the planner, each without one of its guards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.planner import guards, memory, moves, needs, planner, sizing, step_fit
from paceline.core.planner.actions import Decision
from paceline.core.planner.guards import Guards
from paceline.core.planner.memory import PlanningState
from paceline.core.planner.needs import Outlook, RoleNeed
from paceline.core.planner.objectives import Objectives
from paceline.core.planner.planner import Planner
from paceline.core.planner.reports import Report, Role, Steps, WorkerReport
from paceline.core.planner.step_fit import Observed

Patch = pytest.MonkeyPatch


def without_a_look_for_missing_figures(patch: Patch) -> None:
    """Believe every report, whatever is missing in it."""
    for module in (guards, memory):
        patch.setattr(module, "missing", lambda report, objectives: "")
    patch.setattr(guards, "is_fresh", lambda worker, objectives: True)


def without_a_watch_after_lost_reports(patch: Patch) -> None:
    """Shrink with the first complete report after a gap."""

    def observe(state: PlanningState, report: Report, objectives: Objectives) -> PlanningState:
        return replace(original(state, report, objectives), since=-1e9)

    original = memory.observe
    patch.setattr(planner, "observe", observe)


def without_the_guard_against_reversals(patch: Patch) -> None:
    """Change the fleet back as soon as the need seems to have changed."""
    patch.setattr(Guards, "_reversal", lambda guards, role, change, patience: "")


def without_a_pause_while_workers_start(patch: Patch) -> None:
    """Shrink while workers start or drain."""
    patch.setattr(Guards, "_is_changing", lambda guards, role: False)


def without_a_look_for_stuck_workers(patch: Patch) -> None:
    """Wait for ever for a worker that never starts."""
    patch.setattr(Guards, "is_stuck", lambda guards, role: False)


def without_room_for_requests(patch: Patch) -> None:
    """Drain a worker although the others have no room for its requests."""

    def leaving(guards: Guards, worker: WorkerReport, others: list[WorkerReport], wanted: int) -> str:
        return original(guards, replace(worker, running=0, waiting=0, kv_pressure=0.0), others, wanted)

    original = Guards.leaving
    patch.setattr(Guards, "leaving", leaving)


def without_a_last_worker(patch: Patch) -> None:
    """Let the last worker of a role leave while there are requests."""

    def leaving(guards: Guards, worker: WorkerReport, others: list[WorkerReport], wanted: int) -> str:
        reason = original(guards, worker, others, wanted)
        return "" if "last ready" in reason else reason

    original = Guards.leaving
    patch.setattr(Guards, "leaving", leaving)
    patch.setattr(Outlook, "is_idle", property(lambda outlook: not outlook.waiting))


def without_pinned_counts(patch: Patch) -> None:
    """Size roles that a person has set."""

    def size(needs: dict[Role, RoleNeed], outlook: Outlook) -> dict[Role, int]:
        free = {role: replace(seen, pinned=None) for role, seen in outlook.report.roles.items()}
        return original(needs, replace(outlook, report=replace(outlook.report, roles=free)))

    original = sizing.size
    patch.setattr(planner, "size", size)


def without_the_budget(patch: Patch) -> None:
    """Start as many workers as are needed."""
    patch.setattr(moves, "devices", lambda counts, objectives: 0)
    patch.setattr(moves, "draining_devices", lambda report, objectives: 0)
    patch.setattr(sizing, "devices", lambda counts, objectives: 0)


def without_draining_devices(patch: Patch) -> None:
    """Give the devices of draining workers away before these have ended."""
    patch.setattr(moves, "draining_devices", lambda report, objectives: 0)


def without_limits(patch: Patch) -> None:
    """Ignore the least and the most of each role."""

    def size(needs: dict[Role, RoleNeed], outlook: Outlook) -> dict[Role, int]:
        limits = {role: replace(each, least=0, most=99) for role, each in outlook.objectives.roles.items()}
        return original(needs, replace(outlook, objectives=replace(outlook.objectives, roles=limits)))

    original = sizing.size
    patch.setattr(planner, "size", size)


def without_a_look_at_shared_cores(patch: Patch) -> None:
    """Let roles grow whose workers share all cores of the only machine."""
    patch.setattr(needs, "limits_of", lambda role, report, objectives: objectives.limits(role))


def without_idleness(patch: Patch) -> None:
    """Keep a worker of each role although there has been no request for long."""
    patch.setattr(Outlook, "is_idle", property(lambda outlook: False))


def without_a_wake(patch: Patch) -> None:
    """Wait for measured step times before a fleet without workers grows."""

    def unmeasured(role: Role, outlook: Outlook) -> RoleNeed:
        wanted = outlook.report.roles[role].wanted
        return RoleNeed(wanted, wanted, wanted, "unknown")

    patch.setattr(needs, "_unmeasured", unmeasured)


def with_old_reports(patch: Patch) -> None:
    """Decide from a report that is older than the last one."""

    def decide(self: Planner, report: Report) -> Decision:
        self.state = replace(self.state, at=None)
        return original(self, report)

    original = Planner.decide
    patch.setattr(Planner, "decide", decide)


def with_cold_steps(patch: Patch) -> None:
    """Learn from the first steps of new workers, and from the last observation only."""
    patch.setattr(memory, "WARM_SECONDS", 0.0)

    def add(observed: Observed, steps: Steps) -> Observed:
        slowest = max((*observed.seconds, steps.seconds.percentile(0.5)))
        return Observed(steps.tokens, steps.context, (slowest,) * 3)

    patch.setattr(step_fit.Observed, "add", add)


def without_revisions(patch: Patch) -> None:
    """Name no state of the fleet in decisions, so that they are carried out although somebody else has acted."""

    def decide(self: Planner, report: Report) -> Decision:
        return replace(original(self, report), expects="")

    original = Planner.decide
    patch.setattr(Planner, "decide", decide)


MUTATIONS = {
    name: mutate for name, mutate in globals().items() if name.startswith(("without_", "with_")) and callable(mutate)
}
