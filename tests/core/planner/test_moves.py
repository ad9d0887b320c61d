"""Flips, drains and starts from given needs and targets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.planner.actions import Action, Add
from paceline.core.planner.guards import Guards
from paceline.core.planner.load import LoadSample
from paceline.core.planner.memory import Change, PlanningState, RoleMemory
from paceline.core.planner.moves import Moves
from paceline.core.planner.needs import Outlook, RoleNeed
from paceline.core.planner.objectives import Objectives, RoleLimits
from paceline.core.planner.reports import Report, Role, RoleReport, WorkerReport

LIMITS: dict[Role, RoleLimits] = {"prefill": RoleLimits(1, 8), "decode": RoleLimits(1, 8)}
NEEDS: dict[Role, RoleNeed] = {"prefill": RoleNeed(2, 2, 2, "queued tokens"), "decode": RoleNeed(3, 4, 4, "forecast")}
"""Prefill lacks a worker now. The fourth decode worker is a reserve."""

LOAD = LoadSample(500.0, {"prefill": 1000.0, "decode": 100.0}, {"prefill": 0.0, "decode": 0.0})


def choose(
    needs: dict[Role, RoleNeed],
    budget: int,
    decode: int = 4,
    running: int = 0,
    memory: RoleMemory | None = None,
    flips: bool = True,
    most_prefill: int = 8,
) -> list[Action]:
    """Return the actions for one prefill and some decode workers, if as many are wanted as `needs` says.

    Args:
        memory: what is remembered of decode workers.
        running: requests of each worker, which has places for 8.
    """
    named: list[tuple[str, Role]] = [("w0", "prefill"), *((f"w{number}", "decode") for number in range(1, 1 + decode))]
    workers = tuple(
        WorkerReport(name, role, state_seconds=100.0, running=running, max_seqs=8, flips_to=("prefill",))
        for name, role in named
    )
    times = RoleReport(0, startup_seconds=60.0, drain_seconds=10.0, flip_seconds=4.0)
    roles: dict[Role, RoleReport] = {"prefill": replace(times, wanted=1), "decode": replace(times, wanted=decode)}
    report = Report(500.0, "1", workers, roles, {})
    state = PlanningState(at=500.0, busy_at=500.0, load=LOAD, roles={"decode": memory or RoleMemory()})
    limits: dict[Role, RoleLimits] = {**LIMITS, "prefill": RoleLimits(1, most_prefill)}
    outlook = Outlook(report, Objectives(roles=limits, budget=budget, flips=flips), state)
    moves = Moves(outlook, needs, {role: need.least for role, need in needs.items()})
    moves.choose()
    return moves.actions


def test_a_reserve_flips_at_once_and_is_replaced_by_a_start() -> None:
    flip, start = choose(NEEDS, budget=6)
    assert (flip.kind, start) == ("flip", Add("decode", 4, "forecast"))


def test_a_reserve_stays_if_nothing_can_replace_it() -> None:
    assert not choose(NEEDS, budget=5)


def test_a_reserve_stays_if_only_the_forecast_asks_for_more() -> None:
    later: dict[Role, RoleNeed] = {**NEEDS, "prefill": RoleNeed(1, 2, 2, "forecast")}
    assert choose(later, budget=6) == [Add("prefill", 2, "forecast")]


def test_a_start_comes_in_place_of_a_reserve_that_may_not_leave() -> None:
    assert choose(NEEDS, budget=6, running=8) == [Add("prefill", 2, "queued tokens")]


def test_a_role_without_any_worker_gets_the_last_device() -> None:
    assert choose(NEEDS, budget=2, decode=0) == [Add("decode", 1, "forecast")]


@pytest.mark.parametrize(("now", "flips"), [(2, True), (1, False)])
def test_relapses_keep_no_worker_that_another_role_lacks_now(now: int, flips: bool) -> None:
    # Decode grew 100 s ago under the same load. A start and a drain take 70 s, which counts eightfold after 3 relapses.
    memory = RoleMemory(grown=Change(400.0, LOAD), relapses=3)
    needs: dict[Role, RoleNeed] = {
        "prefill": RoleNeed(now, 2, 2, "queued tokens"),
        "decode": RoleNeed(3, 3, 3, "tokens/s"),
    }
    assert [action.kind for action in choose(needs, budget=5, memory=memory)] == ["flip"] * flips


@pytest.mark.parametrize(("most", "kinds"), [(8, ["drain"]), (1, [])])
def test_a_role_that_may_not_grow_lacks_no_worker(most: int, kinds: list[str]) -> None:
    memory = RoleMemory(grown=Change(400.0, LOAD), relapses=3)
    needs: dict[Role, RoleNeed] = {
        "prefill": RoleNeed(2, 1, 2, "queued tokens"),
        "decode": RoleNeed(3, 3, 3, "tokens/s"),
    }
    found = choose(needs, budget=5, memory=memory, flips=False, most_prefill=most)
    assert [action.kind for action in found] == kinds


@pytest.mark.parametrize(("now", "budget", "kinds"), [(2, 5, ["drain"]), (1, 5, []), (2, 6, ["add"])])
def test_without_flips_a_worker_drains_early_if_another_role_lacks_its_device_now(
    now: int, budget: int, kinds: list[str]
) -> None:
    # Four were needed until 80 s ago. A start and a drain take 70 s, but older targets are remembered as well.
    targets = tuple((at, 4 if at <= 420 else 3) for at in range(400, 500, 5))
    memory = RoleMemory(grown=Change(390.0, LOAD), relapses=3, targets=targets)
    needs: dict[Role, RoleNeed] = {
        "prefill": RoleNeed(now, 2, 2, "queued tokens"),
        "decode": RoleNeed(3, 3, 3, "tokens/s"),
    }
    assert [action.kind for action in choose(needs, budget, memory=memory, flips=False)] == kinds


@pytest.mark.parametrize(("wanted", "reason"), [(1, "w1 is the last ready decode worker"), (0, "")])
def test_the_last_ready_worker_of_an_idle_role_stays_while_another_one_is_wanted(wanted: int, reason: str) -> None:
    """The other one may be starting, or may be stuck, and then the role would serve nothing."""
    last, other = WorkerReport("w1", "decode"), WorkerReport("w2", "decode", state="starting")
    outlook = Outlook(Report(500.0, "1", (last, other), {}, {}), Objectives(roles=LIMITS), PlanningState(at=500.0))
    assert outlook.is_idle
    assert Guards(outlook).leaving(last, [other], wanted) == reason
    assert Guards(outlook).leaving(other, [last], wanted) == ""
