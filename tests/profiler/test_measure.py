"""What the phases of a profile keep."""

from __future__ import annotations

from paceline.profiler.measure import Traced, while_answered
from paceline.profiler.stack import ProfiledAnswer


def answer(sent: float, *token_times: float) -> ProfiledAnswer:
    return ProfiledAnswer("name", 8, token_times, sent)


def test_prompts_count_while_all_other_requests_are_answered() -> None:
    others = [answer(10.0, 1.0, 9.0), answer(10.0, 3.0, 8.0)]
    crowded: list[Traced] = [(answer(sent, 0.5), {}) for sent in (12.9, 13.0, 17.5, 17.6)]
    assert [own.sent for own, _ in while_answered(crowded, others)] == [13.0, 17.5]
    assert while_answered([(answer(15.0), {})], others) == while_answered(crowded, [answer(10.0)]) == []
