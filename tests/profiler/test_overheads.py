"""The times around steps, from traces."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.step_record import StepRecord
from paceline.profiler.overheads import find_admission, find_admit, find_lateness, find_overheads
from paceline.profiler.stack import ProfiledAnswer


def traced(
    tokens: int, asked: float = 2.0, handed_over: bool = True, attempts: int = 1, client: float = 5.0
) -> tuple[ProfiledAnswer, dict[str, Any]]:
    """Return a request that is admitted 3 ms after it is asked for, computed in 40 ms, and gives its first token 44 ms
    later. The client sees it `client` ms later."""
    attempt = {
        "admission": {"asked_ms": asked, "at_ms": asked + 3},
        "prefill": {"steps_ms": 40.0},
        "first_token_ms": asked + 47,
        "handoff": {"told_ms": asked + 48} if handed_over else None,
        "decode": {"first_token_ms": asked + 62} if handed_over else None,
    }
    trace = {"parts": [{"prompt_tokens": tokens, "attempts": [attempt] * attempts}]}
    return ProfiledAnswer("name", tokens, ((asked + 47 + client) / 1000,), 0.0), trace


def test_what_a_trace_tells_is_split_into_delays() -> None:
    found = find_overheads([traced(16), traced(64), traced(64, attempts=2)], [traced(1002, asked=12.0)], 0.010)
    assert found.gateway.seconds == pytest.approx(0.002)
    assert found.gateway.per_token == pytest.approx(0.010 / 1002)
    assert found.admit.seconds == pytest.approx(0.003)
    assert found.prefill_join.seconds == pytest.approx(0.002)
    assert found.first_token.seconds == pytest.approx(0.002 + 0.005)
    assert found.handoff.seconds == pytest.approx(0.001 + 0.002)
    assert found.decode_join.seconds == found.token.seconds == pytest.approx(0.002)


def test_without_prefill_workers_nothing_is_handed_over() -> None:
    found = find_overheads([traced(16, handed_over=False)], [], 0.010)
    assert found.handoff.seconds == found.decode_join.seconds == found.gateway.per_token == 0


def steps(number: int, context: int, *ended: float, sequences: int = 1) -> list[StepRecord]:
    """Return the steps that decode one answer, the first of which has a number and a context."""
    return [StepRecord(number + index, at, 0.01, 0, 0, sequences, 0, context + index) for index, at in enumerate(ended)]


def test_tokens_sometimes_come_late() -> None:
    answers = [
        ProfiledAnswer("a", 8, (0.1, 0.119, 0.120, 0.130, 0.144, 0.150), 0.0),
        ProfiledAnswer("b", 8, (0.1, 0.110, 0.120), 0.0),
    ]
    decoded = [*steps(0, 9, 7.01, 7.02, 7.03, 7.04, 7.05), *steps(5, 9, 8.01, 8.02)]
    assert find_lateness(answers, [*decoded, *steps(7, 30, 9.0)]) == pytest.approx([0.0, 0.004, 0.0, 0.0])


def test_answers_whose_tokens_do_not_agree_with_steps_tell_no_lateness() -> None:
    in_two_pieces, whole = (
        ProfiledAnswer("a", 8, (0.1, 0.111, 0.131), 0.0),
        ProfiledAnswer("b", 16, (0.1, 0.110, 0.122, 0.130), 0.0),
    )
    decoded = [*steps(0, 9, 7.01, 7.02, 7.03), *steps(3, 17, 8.01, 8.02, 8.03)]
    assert find_lateness([in_two_pieces, whole], decoded) == pytest.approx([0.001, -0.001])
    assert find_lateness([whole], steps(0, 17, 8.01, 8.02, 8.03, sequences=2)) == []
    assert find_lateness([whole, whole], decoded) == pytest.approx([0.001, -0.001])
    assert find_lateness([whole], [*steps(0, 17, 8.01, 8.02), *steps(3, 19, 8.03)]) == []


def test_delays_of_tokens_differ_as_their_lateness_does() -> None:
    found = find_overheads([traced(16), traced(64)], [], 0.010, [0.004, 0.0, -0.001, 0.0, 0.0])
    assert [found.token.at(0, level) for level in (0.0, 0.5, 1.0)] == pytest.approx([0.001, 0.002, 0.006])
    assert found.decode_join.at(0, 1.0) == pytest.approx(0.002)
    # No handoff tells the median, so the earliest token has no delay.
    found = find_overheads([traced(16, handed_over=False)], [], 0.010, [0.004, 0.0, -0.001, 0.0, 0.0])
    assert [found.token.at(0, level) for level in (0.0, 0.5, 1.0)] == pytest.approx([0.0, 0.001, 0.005])


def test_prompts_begin_later_while_others_decode() -> None:
    alone, crowded = [traced(64)] * 3, [traced(64, asked=asked, client=9.0) for asked in (1.0, 22.0, 32.0)]
    found = find_admit(alone, crowded, 0.010)
    # The gateway has it 20 ms later, and the client another 4 ms, of which 5 ms are the wait for the turn.
    assert found.at(0, 0.5) == pytest.approx(0.019)
    assert (found.at(0, 0.0), found.at(0, 1.0)) == pytest.approx((0.0, 0.029), rel=1e-4)
    assert find_admit(alone, [], 0.010).seconds == 0


def test_admissions_at_the_same_time_take_longer() -> None:
    # Admitted after 8 and 12 ms instead of 5. Two more had to wait.
    group = [traced(64, asked=asked) for asked in (5.0, 9.0, 20.0, 300.0)]
    assert find_admission([traced(64)] * 3, [group, [traced(64)]]) == pytest.approx(0.005 / 3)
    assert find_admission([], [group]) == find_admission([traced(64)], []) == 0
