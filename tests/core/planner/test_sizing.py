"""The division of too few devices: the present load first, then reserves for the forecast."""

from __future__ import annotations

import pytest

from paceline.core.planner.memory import PlannerState
from paceline.core.planner.needs import Need, Outlook
from paceline.core.planner.objectives import Objectives, RoleLimits
from paceline.core.planner.reports import Report, Role, RoleReport
from paceline.core.planner.sizing import size


def divided(prefill: Need, decode: Need, present: tuple[int, int], budget: int) -> tuple[int, int]:
    limits: dict[Role, RoleLimits] = {"prefill": RoleLimits(1, 20), "decode": RoleLimits(1, 20)}
    roles: dict[Role, RoleReport] = {"prefill": RoleReport(present[0]), "decode": RoleReport(present[1])}
    report = Report(0.0, "1", (), roles, {})
    outlook = Outlook(report, Objectives(roles=limits, budget=budget), PlannerState())
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
