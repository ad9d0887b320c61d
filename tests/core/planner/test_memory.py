"""What a planner remembers of changes."""

from __future__ import annotations

import pytest

from paceline.core.planner.memory import PlanningState, observe
from paceline.core.planner.objectives import Objectives, RoleLimits
from tests.core.planner.fleets import decode_report

OBJECTIVES = Objectives(roles={"decode": RoleLimits(0, 8)})


@pytest.mark.parametrize(
    ("seconds", "relapses"),
    [
        pytest.param(60, 1, id="soon after it shrank, a role was too small"),
        pytest.param(300, 0, id="a role that was large enough for long grows because of its load"),
    ],
)
def test_growth_after_a_shrink_is_a_relapse_if_it_comes_soon(seconds: int, relapses: int) -> None:
    state = PlanningState()
    for at in range(0, seconds + 15, 5):
        wanted = 1 if 10 <= at < 10 + seconds else 2
        state = observe(state, decode_report(float(at), wanted, 10), OBJECTIVES)
    assert state.role("decode").relapses == relapses
