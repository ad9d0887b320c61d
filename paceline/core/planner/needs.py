"""The workers that each role needs: for the load that arrives, for requests that wait already, and for the forecast
load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.planner import capacity
from paceline.core.planner.capacity import Places, Wanted
from paceline.core.planner.memory import PlanningState, RoleMemory, settle_seconds
from paceline.core.planner.objectives import Objectives, RoleLimits, devices, draining_devices, limits_of
from paceline.core.planner.reports import Report, Role, WorkerReport
from paceline.core.planner.step_fit import FittedStepTimes

SLACK = 1.2
"""A role shrinks only if it would still be large enough for this multiple of the load."""
_FULL = 0.9
"""Decode workers count as full if at least this share of their places or memory is in use."""
_MOST_BOOST, _BOOST, _CALM = 1.5, 1.1, 0.99
"""Limit of a role's boost, its factor after a forecast at which objectives are missed, and after any other forecast."""
_ENOUGH_VALUES = 20
"""Least number of measured latencies for a meaningful percentile."""


@dataclass(frozen=True, slots=True)
class RoleNeed:
    """The workers that a role needs: it grows below `least` and shrinks above `most`."""

    now: int
    """Number of workers that the present load needs. Further workers up to `least` are a reserve for the forecast load.
    """
    least: int
    most: int
    reason: str
    backlog: float = 0.0
    """Number of workers that running and waiting requests need now, without a reserve."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """All inputs from which the needs of roles are computed."""

    report: Report
    objectives: Objectives
    state: PlanningState

    @property
    def is_idle(self) -> bool:
        """Whether no report has shown a request for `idle_seconds`, so that even the last workers may leave."""
        return self.report.at - self.state.busy_at >= self.objectives.idle_seconds

    @property
    def waiting(self) -> int:
        """Number of requests that wait at gateways."""
        return sum(each.waiting for each in self.report.traffic.values())

    def limits(self, role: Role) -> RoleLimits:
        """Return the limits of a role now."""
        return limits_of(role, self.report, self.objectives)

    def workers(self, role: Role) -> list[WorkerReport]:
        """Return the ready workers of a role."""
        return [each for each in self.report.workers if each.role == role and each.state == "ready"]

    def now(self) -> list[Wanted]:
        """Return the recent load of every class."""
        return [Wanted(each.now(), self.objectives.latency(name)) for name, each in self.state.classes.items()]

    def expected(self, ahead: int) -> list[Wanted]:
        """Return the expected load of every class in `ahead` intervals of the slow loop."""
        expected = {name: each.expected(ahead) for name, each in self.state.classes.items()}
        return [Wanted(demand, self.objectives.latency(name)) for name, demand in expected.items() if demand]

    def awaited(self) -> Role | None:
        """Return the role for whose workers the requests at gateways wait.

        Returns None if the requests wait for memory that a further worker would only share.
        """
        if (first := self.report.first_role) != "decode":
            return first
        workers = self.workers("decode")
        places = sum(each.max_seqs for each in workers)
        if sum(each.running for each in workers) >= _FULL * places:
            return "decode"
        if math.fsum(each.kv_pressure for each in workers) < _FULL * len(workers):
            return "prefill"
        return None if all(each.shares_memory for each in workers) else "decode"


def assess(outlook: Outlook) -> dict[Role, RoleNeed]:
    """Return the need of every role. Prefill is computed last, because its need depends on the workers that could flip
    to it.
    """
    needs: dict[Role, RoleNeed] = {}
    for role in sorted(outlook.report.roles, key=("decode", "encode", "pool", "prefill").index):
        needs[role] = _assess(role, outlook, needs)
    return {role: needs[role] for role in outlook.report.roles}


def _assess(role: Role, outlook: Outlook, others: Mapping[Role, RoleNeed]) -> RoleNeed:
    memory = outlook.state.role(role)
    if outlook.is_idle:
        return RoleNeed(0, 0, 0, "no requests")
    if role == "encode" and not any(each.demand.media_rate > 1e-6 for each in outlook.now()):
        return RoleNeed(0, 0, 0, "no media")
    times = memory.times
    if times is None:
        return _unmeasured(role, outlook)
    classes = outlook.now()
    steady = by_load(role, classes, times, outlook, memory.boost)
    slack = by_load(role, classes, times, outlook, memory.boost * SLACK)
    busy, why = _by_queue(role, classes, times, outlook, others)
    now = max(1, math.ceil(max(steady, busy) - 1e-6))
    least = max(now, memory.floor)
    most = max(least, math.ceil(max(slack, busy) - 1e-6))
    if memory.floor >= max(steady, busy):
        why = "forecast"
    elif steady >= busy:
        work = math.fsum(each.demand.work(role) for each in classes)
        why = f"{work:,.0f} tokens/s" if role != "encode" else f"{work:,.1f} media inputs/s"
    boosted = f", x{memory.boost:.2f} for missed objectives" if memory.boost > 1.005 else ""
    return RoleNeed(now, least, most, f"{why}{boosted} needs {least}", busy)


def _unmeasured(role: Role, outlook: Outlook) -> RoleNeed:
    """Return the need of a role before steps were measured: its number of workers, plus one if requests wait."""
    wanted = outlook.report.roles[role].wanted
    ready = len(outlook.workers(role))
    waits = outlook.waiting > 0 and role == outlook.awaited()
    more = ready >= wanted and waits
    least = max(1, wanted + more)
    return RoleNeed(
        least, least, least, f"{outlook.waiting} requests wait" if waits else "step times are not known yet"
    )


def by_load(role: Role, classes: list[Wanted], times: FittedStepTimes, outlook: Outlook, scale: float) -> float:
    """Return the number of workers of a role with which requests meet the objectives under this load."""
    if role in ("prefill", "pool"):
        return capacity.prefill_workers(classes, times, scale)
    if role == "encode":
        return capacity.encode_workers(classes, times, scale)
    return capacity.decode_workers(classes, times, outlook.state.role("prefill").times, _places(outlook), scale)


def _by_queue(
    role: Role, classes: list[Wanted], times: FittedStepTimes, outlook: Outlook, others: Mapping[Role, RoleNeed]
) -> tuple[float, str]:
    """Return the number of workers that the present requests need, and why."""
    workers = [each for each in outlook.report.workers if each.role == role]
    waiting = outlook.waiting if role == outlook.awaited() else 0
    if role == "decode":
        return _by_running(workers, waiting, classes, times, _places(outlook), outlook)
    if role == "encode":
        items = sum(each.running + each.waiting for each in workers)
        patience = _patience("encode", classes, outlook, others)
        return items * times.seconds(times.observed_tokens, 0) / patience, f"{items} queued"
    rate = math.fsum(each.demand.rate for each in classes)
    work = math.fsum(each.demand.work(role) for each in classes)
    mean = work / rate if rate else 0.0
    # A prompt that is being computed does not wait.
    queues = (max(0.0, each.queued_tokens - mean * (each.state == "ready")) for each in workers)
    tokens = math.fsum(queues) + waiting * mean
    per_token = times.seconds(times.observed_tokens, times.observed_tokens) / times.observed_tokens
    needed = work * per_token + tokens * per_token / _patience(role, classes, outlook, others)
    return needed, f"{tokens:,.0f} queued tokens"


def _by_running(
    workers: Sequence[WorkerReport],
    waiting: int,
    classes: Sequence[Wanted],
    times: FittedStepTimes,
    places: Places,
    outlook: Outlook,
) -> tuple[float, str]:
    """Return the number of decode workers that running requests and requests waiting for a place need, and why."""
    running = sum(each.running for each in workers) + waiting
    # A request already has a place while its prompt waits, but does not make steps longer yet.
    decoding = max(0, running - round(_queued_prompts(outlook)))
    active = [each for each in classes if each.demand.rate > 0]
    tokens = math.fsum(each.demand.work("decode") for each in active)
    context = math.fsum(capacity.mean_context(each.demand) * each.demand.work("decode") for each in active)
    latencies = [each.latency for each in active]
    most = capacity.sequences_per_worker(latencies, times, places, context / tokens if tokens else 0.0)
    memory = math.fsum(each.kv_pressure for each in workers if not each.shares_memory) / _FULL
    return max(
        (decoding / most, f"{decoding} requests at once"),
        (running / (places.max_seqs * _FULL), f"{running} requests with a place"),
        (memory, "KV memory"),
    )


def _queued_prompts(outlook: Outlook) -> float:
    """Return the approximate number of requests whose prompts wait at prefill workers."""
    classes = outlook.now()
    rate = math.fsum(each.demand.rate for each in classes)
    work = math.fsum(each.demand.work("prefill") for each in classes)
    tokens = sum(each.queued_tokens for each in outlook.report.workers if each.role == "prefill")
    return tokens * rate / work if work else 0.0


def _patience(role: Role, classes: Iterable[Wanted], outlook: Outlook, others: Mapping[Role, RoleNeed]) -> float:
    """Return the seconds within which a queue should become empty: the TTFT objective, but at least the time until new
    workers could help.
    """
    limits = [each.latency.ttft for each in classes if each.latency.ttft is not None and each.demand.rate > 0]
    starts = outlook.report.roles[role].startup_seconds
    return max(min(limits, default=1.0), min([starts, *_flip_seconds(role, outlook, others)]))


def _flip_seconds(role: Role, outlook: Outlook, others: Mapping[Role, RoleNeed]) -> Iterator[float]:
    """Yield the time of a flip to a role, in seconds, from each role that may have a worker for it: a worker that the
    present load does not need, or any worker if the budget is used up, because the devices are then divided anew.
    """
    report, objectives = outlook.report, outlook.objectives
    wanted = {name: seen.wanted for name, seen in report.roles.items()}
    used = devices(wanted, objectives) + draining_devices(report, objectives)
    is_full = objectives.budget is not None and used + objectives.limits(role).devices > objectives.budget
    for source, need in others.items():
        has_one = any(role in each.flips_to for each in outlook.workers(source))
        if objectives.flips and has_one and (is_full or wanted[source] > need.now):
            yield report.roles[source].flip_seconds


def _places(outlook: Outlook) -> Places:
    workers = outlook.workers("decode")
    if not workers:
        return Places(math.inf, 0.0)
    memories = [each.kv_tokens for each in workers if each.kv_tokens]
    return Places(
        sum(each.max_seqs for each in workers) / len(workers), sum(memories) / len(memories) if memories else 0.0
    )


def intervals_ahead(outlook: Outlook) -> int:
    """Return the number of intervals of the slow loop from now until a worker that is started at the next forecast is
    ready.
    """
    starts = max((seen.startup_seconds for seen in outlook.report.roles.values()), default=0.0)
    return math.ceil(starts / outlook.objectives.slow_seconds) + 1


def look_ahead(outlook: Outlook) -> PlanningState:
    """Return the state after the slow loop: with new forecasts, floors and boosts."""
    ahead = intervals_ahead(outlook)
    state = replace(
        outlook.state,
        slow_at=outlook.report.at,
        classes={name: each.end_interval(ahead) for name, each in outlook.state.classes.items()},
    )
    later = replace(outlook, state=state)
    expected = later.expected(ahead)
    late = _late(later)
    roles: dict[Role, RoleMemory] = {}
    for role, seen in outlook.report.roles.items():
        memory = state.role(role)
        times = memory.fit.times()
        floor = 0.0 if times is None else by_load(role, expected, times, later, memory.boost)
        boost = memory.boost * _CALM
        if role in late and _is_settled(role, outlook) and floor <= seen.wanted:
            boost = memory.boost * _BOOST
        roles[role] = replace(
            memory, times=times, floor=math.ceil(floor - 1e-6), boost=min(max(boost, 1.0), _MOST_BOOST)
        )
    return state.with_roles(roles)


def _is_settled(role: Role, outlook: Outlook) -> bool:
    """Return whether all wanted workers have been ready long enough to judge the latencies that they achieve."""
    memory, quiet = outlook.state.role(role), settle_seconds(outlook.report.roles[role])
    changes = [change.at for change in (memory.grown, memory.shrunk) if change]
    return memory.short_since is None and all(outlook.report.at - at >= quiet for at in changes)


def _late(outlook: Outlook) -> set[Role]:
    """Return the roles that miss their objectives at the percentile."""
    late: set[Role] = set()
    awaited = outlook.awaited()
    for name, each in outlook.state.classes.items():
        limits = outlook.objectives.latency(name)
        ttft = limits.ttft
        if awaited and ttft is not None and _misses(each.ttft.count, each.ttft.percentile(limits.percentile), ttft):
            late.add(awaited)
        if limits.itl is not None and _misses(each.itl.count, each.itl.percentile(limits.percentile), limits.itl):
            late.add("decode")
    return late


def _misses(count: float, measured: float, limit: float) -> bool:
    return count >= _ENOUGH_VALUES and measured > limit
