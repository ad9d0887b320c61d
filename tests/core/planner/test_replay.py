"""Values of the planner survive JSON, and a record of decisions replays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.planner import capacity
from paceline.core.planner.actions import Add, Decision, Drain, Flip, Hold
from paceline.core.planner.distribution import Distribution
from paceline.core.planner.objectives import Latency, Objectives, RoleLimits
from paceline.core.planner.planner import Planner
from paceline.core.planner.replay import Entry, Recorder, Replayed, from_json, replay, to_json
from paceline.core.planner.reports import Report, RoleReport, Steps, Traffic, WorkerReport
from tests.core.planner.fleets import decode_report

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
VARIED_OBJECTIVES = Objectives({"chat": Latency(1.0, None, 0.99)}, roles={"decode": RoleLimits(1, 4, 2)}, budget=8)
OBJECTIVES = Objectives(roles={"decode": RoleLimits(1, 8)})


@pytest.mark.parametrize(
    "value",
    [
        REPORT,
        VARIED_OBJECTIVES,
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


@pytest.fixture(scope="module")
def record() -> list[str]:
    recorder = Recorder(Planner(OBJECTIVES))
    reports = [decode_report(5.0 * tick, workers=1, running=10 + 10 * tick) for tick in range(1, 9)]
    return [recorder.start(), *(recorder.decide(report)[1] for report in reports)]


def test_the_same_decisions_come_from_the_same_inputs(record: list[str]) -> None:
    replayed = list(replay(record))
    assert len(replayed) == 8
    assert all(each.same for each in replayed)
    assert any(each.decided.wanted["decode"] > 1 for each in replayed)


def test_a_record_may_go_on_in_the_middle(record: list[str]) -> None:
    planner = Planner(OBJECTIVES)
    for line in record[1:5]:
        planner.decide(from_json(Entry, line).report)
    start = Recorder(planner).start()
    assert all(each.same for each in replay([start, "", *record[5:]]))


def test_another_planner_is_noticed(record: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_ITL_SHARE", 0.3)
    assert not all(each.same for each in replay(record))


def test_a_changed_decision_is_noticed(record: list[str]) -> None:
    entry = from_json(Entry, record[3])
    changed = replace(entry, decision=replace(entry.decision, wanted={"decode": 7}))
    found: list[Replayed] = [each for each in replay([*record[:3], to_json(changed), *record[4:]]) if not each.same]
    assert [(each.line, each.recorded.wanted["decode"]) for each in found] == [(4, 7)]


def test_a_line_that_is_no_record_is_named(record: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="line 1: a record begins"):
        list(replay(record[1:]))
    with pytest.raises(InvalidRequestError, match="line 2: this is no Entry"):
        list(replay([record[0], "{}"]))
