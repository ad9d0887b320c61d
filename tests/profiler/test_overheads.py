"""The times around steps, from traces."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.profiler.overheads import find_overheads
from paceline.profiler.stack import Answer


def traced(
    tokens: int, asked: float = 2.0, handed_over: bool = True, attempts: int = 1
) -> tuple[Answer, dict[str, Any]]:
    """Return a request that is admitted 3 ms after it is asked for, computed in 40 ms, and gives its first token 44 ms
    later. The client sees it 5 ms later."""
    attempt = {
        "admission": {"asked_ms": asked, "at_ms": asked + 3},
        "prefill": {"steps_ms": 40.0},
        "first_token_ms": asked + 47,
        "handoff": {"told_ms": asked + 48} if handed_over else None,
        "decode": {"first_token_ms": asked + 62} if handed_over else None,
    }
    trace = {"parts": [{"prompt_tokens": tokens, "attempts": [attempt] * attempts}]}
    return Answer("name", tokens, ((asked + 52) / 1000,)), trace


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
