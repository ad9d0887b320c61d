"""The division of too few devices: the present load first, then the same room for all roles."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.planner.distribution import Distribution
from paceline.core.planner.load import ClassLoad, Series
from paceline.core.planner.memory import PlanningState, RoleMemory
from paceline.core.planner.needs import Outlook, RoleNeed
from paceline.core.planner.objectives import Latency, Objectives, RoleLimits
from paceline.core.planner.reports import Report, Role, RoleReport, WorkerReport
from paceline.core.planner.sizing import size
from paceline.core.planner.step_fit import FittedStepTimes

LATENCY = Latency(ttft=3.0, itl=0.1)


def divided(
    prefill: RoleNeed,
    decode: RoleNeed,
    present: tuple[int, int],
    budget: int,
    workers: Sequence[WorkerReport] = (),
    state: PlanningState | None = None,
) -> tuple[int, int]:
    limits: dict[Role, RoleLimits] = {"prefill": RoleLimits(1, 20), "decode": RoleLimits(1, 20)}
    roles: dict[Role, RoleReport] = {"prefill": RoleReport(present[0]), "decode": RoleReport(present[1])}
    report = Report(0.0, "1", tuple(workers), roles, {})
    outlook = Outlook(report, Objectives(roles=limits, budget=budget, default=LATENCY), state or PlanningState())
    targets = size({"prefill": prefill, "decode": decode}, outlook)
    return targets["prefill"], targets["decode"]


def need(now: int, least: int) -> RoleNeed:
    return RoleNeed(now, least, least, "")


@pytest.mark.parametrize(
    ("prefill", "decode", "present", "expected"),
    [
        pytest.param(need(3, 5), need(3, 3), (4, 2), (3, 3), id="the reserve is dropped first"),
        pytest.param(need(2, 4), need(2, 4), (2, 2), (3, 3), id="reserves share what is left"),
        pytest.param(need(4, 4), need(4, 4), (4, 2), (3, 3), id="the role that lacks most lacks as little as possible"),
        pytest.param(need(10, 10), need(10, 10), (7, 9), (7, 9), id="a division that is hardly better changes nothing"),
        pytest.param(need(10, 10), need(10, 10), (6, 10), (8, 8), id="a division that is clearly better does"),
        pytest.param(need(1, 1), need(3, 4), (2, 4), (1, 4), id="enough for all"),
    ],
)
def test_devices_are_divided(
    prefill: RoleNeed, decode: RoleNeed, present: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert divided(prefill, decode, present, budget=max(6, sum(present))) == expected


PREFILL, DECODE = FittedStepTimes(0.02, 3.5e-4, 0.0, 512), FittedStepTimes(0.028, 0.004, 0.0, 32)


@pytest.mark.parametrize(
    ("answer", "decode", "present", "expected"),
    [
        pytest.param(
            18.0, RoleNeed(1, 1, 2, ""), (2, 4), (5, 1), id="all roles get room for the same multiple of load"
        ),
        pytest.param(22.0, RoleNeed(1, 1, 2, ""), (4, 2), (4, 2), id="another division would give hardly more room"),
        pytest.param(30.0, RoleNeed(1, 2, 2, ""), (5, 1), (4, 2), id="a role without room gets some from another one"),
    ],
)
def test_scarce_devices_are_divided_by_load(
    answer: float, decode: RoleNeed, present: tuple[int, int], expected: tuple[int, int]
) -> None:
    prompts, answers = Distribution.of([1500.0] * 20), Distribution.of([answer] * 20)
    load = ClassLoad(114.0, 20.0, prompt_tokens=prompts, answer_tokens=answers)
    memories: dict[Role, RoleMemory] = {"prefill": RoleMemory(times=PREFILL), "decode": RoleMemory(times=DECODE)}
    workers = [WorkerReport(f"d{number}", "decode", max_seqs=64) for number in range(present[1])]
    state = PlanningState(classes={"default": load}, roles=memories)
    assert divided(need(4, 5), decode, present, 6, workers, state) == expected


@pytest.mark.parametrize(("coming", "expected"), [(1500.0, (3, 3)), (4500.0, (5, 1))])
def test_devices_that_the_present_load_leaves_follow_the_forecast(coming: float, expected: tuple[int, int]) -> None:
    prompts, answers = Distribution.of([1500.0] * 20), Distribution.of([60.0] * 20)
    forecast = {"rates": Series(2.0, 0.0, 1), "prompts": Series(coming, 0.0, 1), "answers": Series(60.0, 0.0, 1)}
    load = ClassLoad(40.0, 20.0, prompt_tokens=prompts, answer_tokens=answers, **forecast)
    memories: dict[Role, RoleMemory] = {"prefill": RoleMemory(times=PREFILL), "decode": RoleMemory(times=DECODE)}
    workers = [WorkerReport(f"d{number}", "decode", max_seqs=64) for number in range(3)]
    state = PlanningState(classes={"default": load}, roles=memories)
    assert divided(need(2, 5), need(1, 1), (3, 3), 6, workers, state) == expected


def sized(
    needs: dict[Role, RoleNeed], roles: dict[Role, RoleReport], budget: int, **limits: RoleLimits
) -> tuple[int, ...]:
    """Return the targets of roles whose step times are not known yet.

    Args:
        limits: those that are not 1 to 20 workers of one device each.
    """
    all_limits: dict[Role, RoleLimits] = {role: limits.get(role, RoleLimits(1, 20)) for role in roles}
    outlook = Outlook(Report(0.0, "1", (), roles, {}), Objectives(roles=all_limits, budget=budget), PlanningState())
    return tuple(size(needs, outlook).values())


def test_a_number_that_a_person_has_set_counts_although_the_budget_is_used_up() -> None:
    roles: dict[Role, RoleReport] = {"prefill": RoleReport(2), "decode": RoleReport(4, pinned=5)}
    assert sized({"prefill": need(2, 2), "decode": need(4, 4)}, roles, 6) == (1, 5)


def test_a_role_shrinks_to_its_most_although_the_budget_is_used_up() -> None:
    roles: dict[Role, RoleReport] = {"prefill": RoleReport(2), "decode": RoleReport(4)}
    assert sized({"prefill": need(2, 3), "decode": need(4, 4)}, roles, 6, decode=RoleLimits(1, 3)) == (3, 3)


def test_a_role_that_cannot_change_does_not_hinder_the_others() -> None:
    roles: dict[Role, RoleReport] = {
        "prefill": RoleReport(2),
        "decode": RoleReport(4),
        "encode": RoleReport(1, pinned=1),
    }
    assert sized({"prefill": need(5, 5), "decode": need(2, 2), "encode": need(3, 3)}, roles, 7) == (4, 2, 1)


def test_workers_without_devices_take_none_and_get_none() -> None:
    roles: dict[Role, RoleReport] = {"prefill": RoleReport(2), "decode": RoleReport(3), "encode": RoleReport(1)}
    needs: dict[Role, RoleNeed] = {"prefill": need(3, 3), "decode": need(3, 3), "encode": need(1, 1)}
    assert sized(needs, roles, 6, encode=RoleLimits(0, 8, 0)) == (3, 3, 1)


def test_equal_roles_get_devices_in_a_fixed_order() -> None:
    roles: dict[Role, RoleReport] = {"prefill": RoleReport(0), "decode": RoleReport(4), "encode": RoleReport(0)}
    same = {role: need(4, 4) for role in roles}
    assert sized(same, roles, 8) == (3, 3, 2)


def test_a_role_that_lacks_most_of_its_workers_gets_devices() -> None:
    prefill, decode = RoleNeed(50, 50, 50, "", 50.0), RoleNeed(1, 1, 2, "", 0.5)
    memories: dict[Role, RoleMemory] = {"prefill": RoleMemory(times=PREFILL), "decode": RoleMemory(times=DECODE)}
    assert divided(prefill, decode, (4, 4), 8, state=PlanningState(roles=memories)) == (7, 1)


def test_a_role_without_known_step_times_gets_no_reserve() -> None:
    prompts, answers = Distribution.of([1500.0] * 20), Distribution.of([60.0] * 20)
    memories: dict[Role, RoleMemory] = {"prefill": RoleMemory(times=PREFILL), "decode": RoleMemory(times=DECODE)}
    state = PlanningState(
        classes={"default": ClassLoad(40.0, 20.0, prompt_tokens=prompts, answer_tokens=answers)}, roles=memories
    )
    needs: dict[Role, RoleNeed] = {"prefill": need(2, 4), "decode": need(2, 7), "encode": need(1, 1)}
    roles: dict[Role, RoleReport] = {"prefill": RoleReport(4), "decode": RoleReport(7), "encode": RoleReport(1)}
    limits: dict[Role, RoleLimits] = {role: RoleLimits(1, 20) for role in roles}
    outlook = Outlook(Report(0.0, "1", (), roles, {}), Objectives(roles=limits, budget=12, default=LATENCY), state)
    assert size(needs, outlook)["encode"] == 1


def test_a_role_at_its_most_does_not_hinder_the_others() -> None:
    roles: dict[Role, RoleReport] = {"prefill": RoleReport(5), "decode": RoleReport(3), "encode": RoleReport(4)}
    needs: dict[Role, RoleNeed] = {"prefill": need(10, 10), "decode": need(8, 8), "encode": need(4, 4)}
    assert sized(needs, roles, 12, decode=RoleLimits(1, 3)) == (6, 3, 3)


@pytest.mark.parametrize("encode", [0, 1])
def test_workers_without_devices_change_no_division(encode: int) -> None:
    roles: dict[Role, RoleReport] = {"prefill": RoleReport(7), "decode": RoleReport(9), "encode": RoleReport(encode)}
    needs: dict[Role, RoleNeed] = {"prefill": need(10, 10), "decode": need(10, 10), "encode": need(0, 0)}
    assert sized(needs, roles, 16, encode=RoleLimits(0, 8, 0)) == (7, 9, 0)


@pytest.mark.parametrize(("present", "least", "expected"), [(0, 0, 1), (1, 0, 1), (3, 0, 3), (1, 2, 2)])
@pytest.mark.parametrize("budget", [None, 4])
def test_workers_that_share_cores_do_not_grow(present: int, least: int, expected: int, budget: int | None) -> None:
    roles: dict[Role, RoleReport] = {"decode": RoleReport(present, shares_cores=True)}
    outlook = Outlook(
        Report(0.0, "1", (), roles, {}),
        Objectives(roles={"decode": RoleLimits(least, 8)}, budget=budget, default=LATENCY),
        PlanningState(),
    )
    assert size({"decode": need(6, 6)}, outlook) == {"decode": expected}


def test_a_role_without_need_gives_its_device_back() -> None:
    roles: dict[Role, RoleReport] = {"prefill": RoleReport(11), "decode": RoleReport(8), "encode": RoleReport(1)}
    needs: dict[Role, RoleNeed] = {"prefill": need(12, 12), "decode": need(8, 8), "encode": need(0, 0)}
    assert sized(needs, roles, 20, encode=RoleLimits(0, 8)) == (12, 8, 0)
