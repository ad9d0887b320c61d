"""The division of too few devices: the present load first, then the same room for all roles."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.planner.distribution import Distribution
from paceline.core.planner.load import ClassLoad
from paceline.core.planner.memory import PlannerState, RoleMemory
from paceline.core.planner.needs import Need, Outlook
from paceline.core.planner.objectives import Latency, Objectives, RoleLimits
from paceline.core.planner.reports import Report, Role, RoleReport, WorkerReport
from paceline.core.planner.sizing import size
from paceline.core.planner.step_fit import StepTimes

LATENCY = Latency(ttft=3.0, itl=0.1)


def divided(
    prefill: Need,
    decode: Need,
    present: tuple[int, int],
    budget: int,
    workers: Sequence[WorkerReport] = (),
    state: PlannerState | None = None,
) -> tuple[int, int]:
    limits: dict[Role, RoleLimits] = {"prefill": RoleLimits(1, 20), "decode": RoleLimits(1, 20)}
    roles: dict[Role, RoleReport] = {"prefill": RoleReport(present[0]), "decode": RoleReport(present[1])}
    report = Report(0.0, "1", tuple(workers), roles, {})
    outlook = Outlook(report, Objectives(roles=limits, budget=budget, default=LATENCY), state or PlannerState())
    targets = size({"prefill": prefill, "decode": decode}, outlook)
    return targets["prefill"], targets["decode"]


def need(now: int, least: int) -> Need:
    return Need(now, least, least, "")


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
def test_devices_are_divided(prefill: Need, decode: Need, present: tuple[int, int], expected: tuple[int, int]) -> None:
    assert divided(prefill, decode, present, budget=max(6, sum(present))) == expected


PREFILL, DECODE = StepTimes(0.02, 3.5e-4, 0.0, 512), StepTimes(0.028, 0.004, 0.0, 32)


@pytest.mark.parametrize(
    ("answer", "decode", "present", "expected"),
    [
        pytest.param(22.0, Need(1, 1, 2, ""), (2, 4), (5, 1), id="all roles get room for the same multiple of load"),
        pytest.param(22.0, Need(1, 1, 2, ""), (4, 2), (4, 2), id="another division would give hardly more room"),
        pytest.param(30.0, Need(1, 2, 2, ""), (5, 1), (4, 2), id="a role without room gets some from another one"),
    ],
)
def test_scarce_devices_are_divided_by_load(
    answer: float, decode: Need, present: tuple[int, int], expected: tuple[int, int]
) -> None:
    prompts, answers = Distribution.of([1500.0] * 20), Distribution.of([answer] * 20)
    load = ClassLoad(114.0, 20.0, prompt_tokens=prompts, answer_tokens=answers)
    memories: dict[Role, RoleMemory] = {"prefill": RoleMemory(times=PREFILL), "decode": RoleMemory(times=DECODE)}
    workers = [WorkerReport(f"d{number}", "decode", max_seqs=64) for number in range(present[1])]
    state = PlannerState(classes={"default": load}, roles=memories)
    assert divided(need(4, 5), decode, present, 6, workers, state) == expected
