"""A record of decisions replays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.planner import capacity
from paceline.core.planner.codec import from_json, to_json
from paceline.core.planner.objectives import Objectives, RoleLimits
from paceline.core.planner.planner import Planner
from paceline.core.planner.replay import Entry, Recorder, Replayed, replay
from tests.core.planner.fleets import decode_report

OBJECTIVES = Objectives(roles={"decode": RoleLimits(1, 8)})


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
