"""What the planner does in situations in which other planners fail. The proof (`tests/proof`) tries many more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.core.errors import ConfigError
from paceline.core.planner.actions import Decision, Drain, Hold
from paceline.core.planner.distribution import Distribution
from paceline.core.planner.load import ClassLoad
from paceline.core.planner.memory import PlanningState, RoleMemory
from paceline.core.planner.needs import Outlook, assess
from paceline.core.planner.objectives import Latency, Objectives, RoleLimits
from paceline.core.planner.planner import Planner
from paceline.core.planner.replay import from_json, to_json
from paceline.core.planner.reports import Report, Role, RoleReport, Steps, Traffic, WorkerReport
from paceline.core.planner.step_fit import FittedStepTimes
from tests.core.planner.fleets import decode_report

OBJECTIVES = Objectives(
    default=Latency(ttft=1.0, itl=0.06), roles={"decode": RoleLimits(0, 8)}, idle_seconds=20.0, slow_seconds=30.0
)


def run(planner: Planner, make: Callable[[float], Report], ticks: int, first: float = 0.0) -> list[Decision]:
    """Return the decisions from `ticks` reports, five seconds apart."""
    return [planner.decide(make(first + 5.0 * (tick + 1))) for tick in range(ticks)]


def wanted(decisions: list[Decision]) -> list[int]:
    return [decision.wanted["decode"] for decision in decisions]


@pytest.fixture
def planner() -> Planner:
    """Return a planner that has watched two workers with 10 requests each for a while."""
    planner = Planner(OBJECTIVES)
    run(planner, lambda at: decode_report(at, 2, 10), 4)
    return planner


def test_more_load_adds_workers(planner: Planner) -> None:
    decisions = run(planner, lambda at: decode_report(at, 2, 38), 3, first=20.0)
    assert decisions[-1].wanted["decode"] > 2
    assert decisions[-1].line.startswith("add decode 2->")


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_share_cores_get_no_more_beside_them(planner: Planner, workers: int) -> None:
    def sharing(at: float) -> Report:
        report = decode_report(at, 2, 70)
        role = replace(report.roles["decode"], wanted=workers, shares_cores=True)
        return replace(report, workers=report.workers[:workers], roles={"decode": role})

    decisions = run(planner, sharing, 4, first=20.0)
    assert wanted(decisions) == [workers] * 4
    assert decisions[-1].line.endswith(", but more would share the same cores")


@pytest.mark.parametrize(
    ("shares_memory", "waiting", "most"), [(True, 0, 2), (False, 0, 3), (True, 400, 2), (False, 400, 8)]
)
def test_full_memory_asks_for_workers_if_they_bring_memory(
    planner: Planner, shares_memory: bool, waiting: int, most: int
) -> None:
    def full(at: float) -> Report:
        report = decode_report(at, 2, 10)
        workers = (replace(each, kv_pressure=0.95, shares_memory=shares_memory) for each in report.workers)
        traffic = {name: replace(each, waiting=waiting) for name, each in report.traffic.items()}
        return replace(report, workers=tuple(workers), traffic=traffic)

    assert max(wanted(run(planner, full, 4, first=20.0))) == most


@pytest.mark.parametrize(("shares_memory", "expected"), [(True, 1), (False, 2)])
def test_kv_in_shared_memory_keeps_no_worker(planner: Planner, shares_memory: bool, expected: int) -> None:
    def little(at: float) -> Report:
        report = decode_report(at, 2, 1)
        workers = (replace(each, kv_pressure=0.6, shares_memory=shares_memory) for each in report.workers)
        return replace(report, workers=tuple(workers))

    assert min(wanted(run(planner, little, 40, first=20.0))) == expected


def test_a_role_grows_while_an_earlier_change_runs(planner: Planner) -> None:
    def starting(at: float) -> Report:
        report = decode_report(at, 2, 40)
        more = tuple(WorkerReport(f"s{i}", "decode", state="starting", state_seconds=5.0) for i in range(1))
        return replace(report, workers=report.workers + more, roles={"decode": RoleReport(3)})

    assert max(wanted(run(planner, starting, 3, first=20.0))) > 3


@pytest.mark.parametrize(("slow_seconds", "earliest"), [(5.0, 30.0), (30.0, 60.0)])
def test_a_worker_drains_after_a_start_and_a_drain_and_two_forecasts(slow_seconds: float, earliest: float) -> None:
    planner = Planner(replace(OBJECTIVES, slow_seconds=slow_seconds))
    roles = {"decode": RoleReport(2, startup_seconds=20.0, drain_seconds=10.0)}
    run(planner, lambda at: decode_report(at, 2, 38, roles=roles), 40)
    at, enough_since = 200.0, None
    while planner.decide(decode_report(at := at + 5, 2, 1, roles=roles)).wanted["decode"] > 1:
        _, target = planner.state.roles["decode"].targets[-1]
        enough_since = (enough_since or at) if target == 1 else None
    assert enough_since is not None
    assert earliest <= at - enough_since <= earliest + 10


def test_prompts_that_workers_compute_are_no_queue() -> None:
    prompts, answers = Distribution.of([1000.0] * 20), Distribution.of([2.0] * 20)
    memories: dict[Role, RoleMemory] = {"prefill": RoleMemory(times=FittedStepTimes(0.0, 5e-4, 0.0, 512))}
    state = PlanningState(
        classes={"chat": ClassLoad(20.0, 20.0, prompt_tokens=prompts, answer_tokens=answers)}, roles=memories
    )

    def needed(*queued: int, waiting: int = 0) -> float:
        workers = tuple(WorkerReport(f"p{i}", "prefill", queued_tokens=tokens) for i, tokens in enumerate(queued))
        traffic = {"chat": Traffic(5.0, waiting=waiting)}
        decode = WorkerReport("d", "decode", max_seqs=8)
        report = Report(500.0, "1", (*workers, decode), {"prefill": RoleReport(2, startup_seconds=2.0)}, traffic)
        outlook = Outlook(report, replace(OBJECTIVES, default=Latency(ttft=2.0)), replace(state, busy_at=500.0))
        return assess(outlook)["prefill"].backlog

    assert needed(1000, 1000) == needed(0, 0) == pytest.approx(0.5)
    assert needed(3000, 3000) == pytest.approx(0.5 + 4000 * 5e-4 / 2.0)
    assert needed(2000, 0) == needed(1000, 1000, waiting=1) == pytest.approx(0.5 + 1000 * 5e-4 / 2.0)


def test_zero_traffic_scales_to_zero_and_a_request_wakes_the_fleet(planner: Planner) -> None:
    decisions = run(planner, lambda at: decode_report(at, 2, 0), 14, first=20.0)
    assert decisions[-1].wanted["decode"] < 2
    run(planner, lambda at: decode_report(at, 0, 0), 4, first=100.0)
    waiting = {"chat": Traffic(5.0, arrivals=1, waiting=1, oldest_wait=0.1)}
    woken = planner.decide(decode_report(125.0, 0, 0, traffic=waiting))
    assert woken.wanted["decode"] >= 1


def test_without_requests_workers_leave_after_a_start_and_a_drain(planner: Planner) -> None:
    decisions = run(planner, lambda at: decode_report(at, 2, 0), 20, first=20.0)
    first = next(decision for decision in decisions if decision.wanted["decode"] < 2)
    # The last request was at 20 s. Then come 20 idle seconds, and the 40 s of a start and a drain.
    assert 80.0 <= first.at <= 90.0


def test_the_fleet_shrinks_although_a_worker_never_starts(planner: Planner) -> None:
    def stuck(at: float) -> Report:
        report = decode_report(at, 2, 0)
        pending = WorkerReport("s0", "decode", state="starting", state_seconds=at)
        return replace(
            report, workers=(*report.workers, pending), roles={"decode": RoleReport(3, startup_seconds=10.0)}
        )

    decisions = run(planner, stuck, 30, first=20.0)
    first = next(decision for decision in decisions if decision.wanted["decode"] < 3)
    assert next(action.worker for action in first.actions if isinstance(action, Drain)) == "s0"


def test_a_worker_that_does_not_even_exist_is_given_up_first(planner: Planner) -> None:
    roles = {"decode": RoleReport(3, startup_seconds=10.0, drain_seconds=5.0)}
    decisions = run(planner, lambda at: decode_report(at, 2, 0, roles=roles), 30, first=20.0)
    first = next(decision for decision in decisions if decision.wanted["decode"] < 3)
    assert first.actions[0] == Drain("decode", 2, "", "no requests")


def test_a_load_between_two_sizes_does_not_oscillate() -> None:
    # One worker is just too few. Whatever the number of workers is, the same requests are spread over them.
    planner, count, seen = Planner(OBJECTIVES), 1, []
    for tick in range(400):
        count = planner.decide(decode_report(5.0 * tick, count, round(44 / count))).wanted["decode"]
        seen.append(count)
    changes = sum(before != after for before, after in itertools.pairwise(seen))
    assert changes <= 3, seen


@pytest.mark.parametrize(("budget", "flips"), [(4, True), (5, False)])
def test_a_flip_is_compared_with_a_drain_and_a_start_if_the_budget_is_used_up(budget: int, flips: bool) -> None:
    limits: dict[Role, RoleLimits] = {"prefill": RoleLimits(2, 4), "decode": RoleLimits(1, 4)}
    planner = Planner(replace(OBJECTIVES, roles=limits, budget=budget))
    times = RoleReport(0, startup_seconds=3.0, drain_seconds=10.0, flip_seconds=5.0)
    workers = tuple(
        WorkerReport(f"w{number}", "decode" if number else "prefill", state_seconds=100.0, flips_to=("prefill",))
        for number in range(4)
    )

    def report(at: float) -> Report:
        roles: dict[Role, RoleReport] = {"prefill": replace(times, wanted=1), "decode": replace(times, wanted=3)}
        traffic = {"chat": Traffic(5.0, arrivals=1)}
        return Report(at, "1", workers, roles, traffic)

    actions = [action.kind for decision in run(planner, report, 4) for action in decision.actions]
    assert ("flip" in actions) is flips
    assert ("add" in actions) is not flips


def test_a_role_without_workers_does_not_wait_for_later_flips() -> None:
    """One of four workers may flip in a decision, and two roles have none."""
    limits: dict[Role, RoleLimits] = dict.fromkeys(("prefill", "decode", "encode"), RoleLimits(0, 4))
    planner = Planner(replace(OBJECTIVES, roles=limits, budget=8))
    times = RoleReport(0, startup_seconds=30.0, drain_seconds=10.0, flip_seconds=5.0)
    workers = tuple(
        WorkerReport(f"w{number}", "encode", state_seconds=100.0, flips_to=("prefill", "decode")) for number in range(4)
    )

    def report(at: float, pinned: int | None) -> Report:
        others = replace(times, pinned=pinned)
        roles: dict[Role, RoleReport] = {"prefill": others, "decode": others, "encode": replace(times, wanted=4)}
        return Report(at, "1", workers, roles, {"chat": Traffic(5.0, arrivals=1, waiting=9, oldest_wait=1.0)})

    run(planner, lambda at: report(at, 0), 20)
    decision = planner.decide(report(105.0, None))
    assert decision.wanted["prefill"] > 0
    assert decision.wanted["decode"] > 0


def test_requests_whose_prompts_wait_make_no_decode_step_longer() -> None:
    limits: dict[Role, RoleLimits] = {"prefill": RoleLimits(1, 1), "decode": RoleLimits(0, 8)}

    def report(at: float, running: int, queued: int) -> Report:
        seen = decode_report(at, 2, 10)
        decode = tuple(replace(each, running=running) for each in seen.workers)
        prefill = WorkerReport("p", "prefill", state_seconds=100.0, queued_tokens=queued)
        return replace(seen, workers=(*decode, prefill), roles={**seen.roles, "prefill": RoleReport(1)})

    def wanted_with(queued: int) -> int:
        planner = Planner(replace(OBJECTIVES, roles=limits))
        run(planner, lambda at: report(at, 10, 0), 4)
        return planner.decide(report(25.0, 60, queued)).wanted["decode"]

    assert wanted_with(queued=100 * 200) == 2
    assert wanted_with(queued=0) > 2


def test_lost_figures_hold_the_fleet(planner: Planner) -> None:
    decisions = run(planner, lambda at: decode_report(at, 2, 0, traffic_age=60.0), 60, first=20.0)
    assert all(isinstance(decision.actions[0], Hold) for decision in decisions)
    assert "60 s old" in decisions[-1].line
    decisions = run(planner, lambda at: decode_report(at, 2, 0, gateways_lost=1), 60, first=400.0)
    assert set(wanted(decisions)) == {2}


def test_a_person_s_number_wins_until_it_is_released(planner: Planner) -> None:
    pinned = {"decode": RoleReport(2, pinned=2)}
    busy = run(planner, lambda at: decode_report(at, 2, 60, roles=pinned), 5, first=20.0)
    assert set(wanted(busy)) == {2}
    assert planner.decide(decode_report(50.0, 2, 60)).wanted["decode"] > 2


def test_a_report_that_comes_late_changes_nothing(planner: Planner) -> None:
    state = planner.state
    decision = planner.decide(decode_report(15.0, 2, 100))
    assert "not newer" in decision.line
    assert planner.state is state


def test_a_planner_goes_on_from_saved_state(planner: Planner) -> None:
    other = Planner(OBJECTIVES, from_json(PlanningState, to_json(planner.state)))
    for at in range(25, 100, 5):
        report = decode_report(float(at), 2, at)
        assert other.decide(report) == planner.decide(report)


def test_a_new_planner_does_not_undo_a_change_that_it_has_not_seen() -> None:
    known = Planner(OBJECTIVES)
    run(known, lambda at: decode_report(at, 1, 40), 5)
    assert known.state.role("decode").times is not None

    def grown_later(ago: float | None) -> list[int]:
        planner = Planner(OBJECTIVES, replace(known.state, at=None))
        roles = {"decode": RoleReport(1, shrunk_seconds=ago, startup_seconds=30.0, drain_seconds=10.0)}
        return wanted(run(planner, lambda at: decode_report(at, 1, 60, roles=roles), 2, first=25.0))

    assert max(grown_later(None)) > 1
    assert max(grown_later(5.0)) == 1


def test_two_planners_that_disagree_undo_each_other_s_changes_less_and_less_often(planner: Planner) -> None:
    count, alone, shrunk = 2, 0, []
    for tick in range(600):
        before, alone = count, alone + 1 if count == 1 else 0
        report = decode_report(20.0 + 5.0 * tick, count, round(4 / count), roles=_settling(count))
        count = planner.decide(report).wanted["decode"]
        if count < before:
            shrunk.append(tick)
        if alone > 8:
            count = 2  # another planner, with another memory, holds one worker for too few
    pauses = [second - first for first, second in itertools.pairwise(shrunk)]
    assert len(pauses) >= 3
    assert all(second > 1.3 * first for first, second in itertools.pairwise(pauses[:3])), pauses


def _settling(count: int) -> dict[Role, RoleReport]:
    return {"decode": RoleReport(count, startup_seconds=30.0, drain_seconds=10.0)}


def test_advice_is_marked() -> None:
    planner = Planner(replace(OBJECTIVES, advisory=True))
    assert planner.decide(decode_report(5.0, 2, 10)).advisory


@pytest.mark.parametrize(
    ("objectives", "message"),
    [
        (Objectives(default=Latency(percentile=95)), "between 0 and 1"),
        (Objectives(classes={"chat": Latency(ttft=0.0)}), "class chat: .* above 0"),
        (Objectives(roles={"decode": RoleLimits(3, 2)}), "least <= most"),
        (Objectives(roles={"decode": RoleLimits(3, 4, 2)}, budget=5), "take 6 devices, the budget has 5"),
    ],
)
def test_objectives_that_contradict_each_other_are_refused(objectives: Objectives, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Planner(objectives)


def pool_report(at: float, workers: int, calls: int, waiting: int = 0) -> Report:
    """Return the report of a fleet of pool workers, for `calls` calls in five seconds of 4,000 tokens, which take a
    second."""
    seconds = Distribution.of([0.125] * 40)
    steps = (Steps(500.0, 0.0, seconds),) if calls else ()
    described = tuple(WorkerReport(f"p{i}", "pool", state_seconds=100.0, steps=steps) for i in range(workers))
    traffic = Traffic(5.0, calls, calls, waiting=waiting, prompt_tokens=Distribution.of([4000.0] * calls))
    roles: dict[Role, RoleReport] = {"pool": RoleReport(workers, startup_seconds=10.0, drain_seconds=5.0)}
    return Report(at, "1", described, roles, {"default": traffic} if calls or waiting else {})


def test_pool_workers_are_as_many_as_the_calls_need() -> None:
    objectives = Objectives(
        default=Latency(ttft=4.0), roles={"pool": RoleLimits(0, 8)}, idle_seconds=20.0, slow_seconds=10.0
    )
    planner = Planner(objectives)
    calm = run(planner, lambda at: pool_report(at, 1, 2), 6)
    assert {decision.wanted["pool"] for decision in calm} == {1}
    busy = run(planner, lambda at: pool_report(at, 1, 14), 3, first=30.0)
    assert busy[0].wanted["pool"] in (4, 5)
    idle = run(planner, lambda at: pool_report(at, 4, 0), 20, first=45.0)
    assert any(decision.wanted["pool"] < 4 for decision in idle)
    asleep = run(planner, lambda at: pool_report(at, 0, 0), 2, first=145.0)
    assert asleep[-1].wanted["pool"] == 0
    awake = planner.decide(pool_report(160.0, 0, 0, waiting=1))
    assert awake.wanted["pool"] >= 1


def test_the_least_workers_of_both_kinds_of_fleets_are_not_added_up() -> None:
    """A fleet has pool workers or the others, so the budget has room for the larger of the two leasts."""
    roles: dict[Role, RoleLimits] = {"prefill": RoleLimits(1), "decode": RoleLimits(1), "pool": RoleLimits(1)}
    Objectives(roles=roles, budget=2).check()
    with pytest.raises(ConfigError, match="take 3 devices, the budget has 2"):
        Objectives(roles={**roles, "pool": RoleLimits(3)}, budget=2).check()
