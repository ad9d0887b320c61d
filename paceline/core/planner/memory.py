"""A planner's memory between two reports, as plain values that can be saved and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.core.planner.load import ClassLoad, LoadSample
from paceline.core.planner.objectives import Objectives
from paceline.core.planner.reports import Report, Role, RoleReport, Traffic, WorkerReport
from paceline.core.planner.step_fit import FittedStepTimes, StepFit

WARM_SECONDS = 15.0
"""Seconds for which a worker must have been ready before its steps count, because first steps compile and allocate."""
STUCK = 3.0
"""A start or a drain that takes this multiple of its usual time counts as stuck, and the planner stops waiting for it.
"""
_SOON = 4.0
"""If a role grows within this multiple of startup plus drain time after a shrink, the shrink was wrong."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a role's number of workers by a planner, not by a person."""

    at: float
    load: LoadSample | None
    """The load at the time of the change; None if this planner has not seen the change."""


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """The planner's memory of one role."""

    wanted: int | None = None
    """The platform's target in the last report."""
    grown: Change | None = None
    shrunk: Change | None = None
    relapses: int = 0
    """Number of times that the role had to grow again after it had shrunk, under the same load."""
    short_since: float | None = None
    """Instant since which fewer workers have been ready than wanted; None if enough are ready."""
    targets: tuple[tuple[float, int], ...] = ()
    """Instants and targets of recent reports. Workers drain only down to the largest of them."""
    floor: int = 0
    """Number of workers that the forecast asks for."""
    boost: float = 1.0
    """Factor on the load, learned from objectives that were missed although the workers seemed to be enough."""
    fit: StepFit = field(default_factory=StepFit)
    times: FittedStepTimes | None = None
    """The step times that `fit` gave at the newest forecast; None if too little is known."""


@dataclass(frozen=True, slots=True)
class PlanningState:
    """Everything that a planner remembers. `replay.to_json` writes a state, and `replay.from_json` reads it."""

    at: float | None = None
    """Instant of the newest report, as `Report.at`; None before the first one."""
    since: float = 0.0
    """Instant since which no report has been missing or incomplete."""
    busy_at: float = 0.0
    """Instant of the newest report that shows a request."""
    slow_at: float | None = None
    """Instant of the newest forecast; None before the first one."""
    load: LoadSample | None = None
    classes: Mapping[str, ClassLoad] = field(default_factory=dict)
    roles: Mapping[Role, RoleMemory] = field(default_factory=dict)

    def role(self, role: Role) -> RoleMemory:
        return self.roles.get(role, RoleMemory())

    def with_roles(self, roles: Mapping[Role, RoleMemory]) -> PlanningState:
        return replace(self, roles={**self.roles, **roles})


def is_fresh(worker: WorkerReport, objectives: Objectives) -> bool:
    """Return whether a worker's report is recent enough to describe its present state."""
    return worker.age <= objectives.stale_seconds


def missing(report: Report, objectives: Objectives) -> str:
    """Return a text that names the missing or outdated parts of a report; empty if there are none."""
    if report.traffic_age > objectives.stale_seconds:
        return f"the figures of gateways are {report.traffic_age:.0f} s old"
    if report.gateways_lost:
        return f"the figures of {report.gateways_lost} gateways are missing"
    if old := [each.worker for each in report.workers if not is_fresh(each, objectives)]:
        return f"{old[0]} has not reported for {objectives.stale_seconds:.0f} s" + f" (and {len(old) - 1} more)" * (
            len(old) > 1
        )
    return ""


def observe(state: PlanningState, report: Report, objectives: Objectives) -> PlanningState:
    """Return the state after a report, which must be newer than all earlier ones."""
    classes = _classes(state, report)
    load = LoadSample.of(report.at, classes.values(), report.roles)
    pause = 0.0 if state.at is None else report.at - state.at
    blind = bool(missing(report, objectives))
    was_away = state.at is None or pause > max(objectives.stale_seconds, 3 * objectives.fast_seconds)
    busy = blind or was_away or _has_requests(report)
    before = state.load or load
    return replace(
        state,
        at=report.at,
        since=report.at if blind or was_away else state.since,
        busy_at=report.at if busy else state.busy_at,
        load=load,
        classes=classes,
        roles={
            role: _observe_role(state.role(role), role, report, objectives, None if was_away else (before, load))
            for role in report.roles
        },
    )


def _classes(state: PlanningState, report: Report) -> dict[str, ClassLoad]:
    pause = 0.0 if state.at is None else report.at - state.at
    silent = {name: Traffic(pause) for name in state.classes if name not in report.traffic}
    return {
        name: state.classes.get(name, ClassLoad()).add(traffic)
        for name, traffic in {**silent, **report.traffic}.items()
    }


def _has_requests(report: Report) -> bool:
    return any(each.arrivals or each.waiting for each in report.traffic.values()) or any(
        each.running or each.waiting or each.queued_tokens for each in report.workers
    )


def _observe_role(
    memory: RoleMemory, role: Role, report: Report, objectives: Objectives, loads: tuple[LoadSample, LoadSample] | None
) -> RoleMemory:
    """Return the memory of a role after a report.

    Args:
        loads: the load at the previous report, and the present load; None if this planner has missed reports.
    """
    seen = report.roles[role]
    workers = [each for each in report.workers if each.role == role]
    fit, times = memory.fit, memory.times
    for worker in workers:
        if worker.steps and worker.state == "ready" and worker.state_seconds >= WARM_SECONDS:
            fit = fit.observe(worker.steps)
    if times is None and fit is not memory.fit:
        times = fit.times()
    ready = sum(each.state == "ready" for each in workers)
    # The load may change at about the time of a change. Then the fleet shrinks with more hesitation than it grows.
    before, now = loads or (None, None)
    grown = _last_change(memory.grown, now, report.at, seen, memory.wanted, 1)
    return replace(
        memory,
        wanted=seen.wanted,
        grown=grown,
        shrunk=_last_change(memory.shrunk, before, report.at, seen, memory.wanted, -1),
        relapses=memory.relapses if grown is memory.grown else _relapses(memory, before, role, settle_seconds(seen)),
        short_since=None if ready >= seen.wanted else memory.short_since or report.at,
        targets=tuple(each for each in memory.targets if each[0] >= report.at - _watch_seconds(seen, objectives)),
        fit=fit,
        times=times,
    )


def _last_change(
    known: Change | None, load: LoadSample | None, at: float, seen: RoleReport, wanted: int | None, sign: int
) -> Change | None:
    """Return the newest change of a role in one direction, 1 for growth and -1 for the opposite."""
    if load is None:
        ago = seen.grown_seconds if sign > 0 else seen.shrunk_seconds
        is_known = ago is None or (known is not None and known.at >= at - ago)
        return known if is_known else Change(at - (ago or 0.0), None)
    has_changed = wanted is not None and sign * (seen.wanted - wanted) > 0 and seen.pinned is None
    return Change(at, load) if has_changed else known


def _relapses(memory: RoleMemory, load: LoadSample | None, role: Role, settle: float) -> int:
    """Return the number of relapses after the role has grown under this load.

    If the role had enough workers for a long time after the shrink, the shrink was right. Then its growth is no
    relapse, even if the loads differ by no more than chance explains.
    """
    if memory.shrunk is None or load is None or memory.shrunk.load is None:
        return memory.relapses
    is_late = load.at - memory.shrunk.at > _SOON * settle
    return 0 if is_late or load.differs(memory.shrunk.load, role) else memory.relapses + 1


def _watch_seconds(seen: RoleReport, objectives: Objectives) -> float:
    """Return the time for which a worker must not have been needed before it drains, in seconds.

    It covers two forecasts, so that one that is low by chance does not end a worker which must be started again later.
    """
    return max(settle_seconds(seen), 2 * objectives.slow_seconds)


def settle_seconds(seen: RoleReport) -> float:
    """Return the longest time that a change of a role takes, in seconds: the time of a start plus the time of a
    drain.
    """
    return seen.startup_seconds + seen.drain_seconds
