"""Flips, drains and starts from given needs and targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paceline.core.planner.actions import Action, Add
from paceline.core.planner.memory import PlannerState
from paceline.core.planner.moves import Moves
from paceline.core.planner.needs import Need, Outlook
from paceline.core.planner.objectives import Objectives, RoleLimits
from paceline.core.planner.reports import Report, Role, RoleReport, WorkerReport

LIMITS: dict[Role, RoleLimits] = {"prefill": RoleLimits(1, 8), "decode": RoleLimits(1, 8)}
NEEDS: dict[Role, Need] = {"prefill": Need(2, 2, 2, "queued tokens"), "decode": Need(3, 4, 4, "forecast")}
"""Prefill lacks a worker now. The fourth decode worker is a reserve."""


def choose(needs: dict[Role, Need], budget: int, decode: int = 4, kept: Iterable[str] = ()) -> list[Action]:
    """Return the actions for one prefill and some decode workers, if as many are wanted as `needs` says.

    Args:
        kept: names of workers that a person keeps: the decode workers are "w1", "w2" and so on.
    """
    workers = tuple(
        WorkerReport(f"w{number}", "decode" if number else "prefill", state_seconds=100.0, flips_to=("prefill",))
        for number in range(1 + decode)
    )
    times = RoleReport(0, startup_seconds=60.0, drain_seconds=10.0, flip_seconds=4.0)
    roles: dict[Role, RoleReport] = {"prefill": replace(times, wanted=1), "decode": replace(times, wanted=decode)}
    report = Report(500.0, "1", workers, roles, {}, pinned_workers=frozenset(kept))
    outlook = Outlook(report, Objectives(roles=LIMITS, budget=budget), PlannerState(at=500.0, busy_at=500.0))
    moves = Moves(outlook, needs, {role: need.least for role, need in needs.items()})
    moves.choose()
    return moves.actions


def test_a_reserve_flips_at_once_and_is_replaced_by_a_start() -> None:
    flip, start = choose(NEEDS, budget=6)
    assert (flip.kind, start) == ("flip", Add("decode", 4, "forecast"))


def test_a_reserve_stays_if_nothing_can_replace_it() -> None:
    assert not choose(NEEDS, budget=5)


def test_a_reserve_stays_if_only_the_forecast_asks_for_more() -> None:
    later: dict[Role, Need] = {**NEEDS, "prefill": Need(1, 2, 2, "forecast")}
    assert choose(later, budget=6) == [Add("prefill", 2, "forecast")]


def test_a_start_comes_in_place_of_a_reserve_that_may_not_leave() -> None:
    assert choose(NEEDS, budget=6, kept=["w1", "w2", "w3", "w4"]) == [Add("prefill", 2, "queued tokens")]


def test_a_role_without_any_worker_gets_the_last_device() -> None:
    assert choose(NEEDS, budget=2, decode=0) == [Add("decode", 1, "forecast")]
