"""Values of the planner survive JSON."""

from __future__ import annotations

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.planner.actions import Add, Decision, Drain, Flip, Hold
from paceline.core.planner.codec import from_json, to_json
from paceline.core.planner.distribution import Distribution
from paceline.core.planner.objectives import Latency, Objectives, RoleLimits
from paceline.core.planner.reports import Report, RoleReport, Steps, Traffic, WorkerReport

REPORT = Report(
    at=100.0,
    revision="7",
    workers=(
        WorkerReport("p1", "prefill", "host", queued_tokens=300, steps=(Steps(512.0, 900.0, Distribution.of([0.1])),)),
        WorkerReport("d1", "decode", state="draining", kv_pressure=0.5, flips_to=("prefill",)),
    ),
    roles={"prefill": RoleReport(1), "decode": RoleReport(1, pinned=2)},
    traffic={"chat": Traffic(5.0, arrivals=3, prompt_tokens=Distribution.of([0, 17, 4000]), oldest_wait=0.5)},
)
ACTIONS = (
    Add("prefill", 3, "more"),
    Drain("decode", 1, "d2", "fewer"),
    Flip("d3", "decode", "prefill", "other"),
)
OBJECTIVES = Objectives({"chat": Latency(1.0, None, 0.99)}, roles={"decode": RoleLimits(1, 4, 2)}, budget=8)


@pytest.mark.parametrize(
    "value",
    [
        REPORT,
        OBJECTIVES,
        Decision(100.0, "7", {"prefill": 3, "decode": 1}, ACTIONS, "more prefill"),
        Decision(100.0, "7", {}, (Hold("nothing to do"),), "nothing to do", advisory=True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_survives_json(value: object) -> None:
    text = to_json(value)
    assert "\n" not in text
    assert from_json(type(value), text) == value


def test_text_that_is_no_report_says_what_is_wrong() -> None:
    with pytest.raises(InvalidRequestError, match=r"no Report: workers.0.role: Input should be 'prefill'"):
        from_json(Report, to_json(REPORT).replace('"role":"prefill"', '"role":"cook"'))
