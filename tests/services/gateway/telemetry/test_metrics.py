"""Metrics of one sequence from its trace."""

from __future__ import annotations

import pytest

from paceline.services.gateway.telemetry.metrics import token_gaps


@pytest.mark.parametrize(
    ("times", "counts", "tokens", "gaps"),
    [
        ([1.0], [1], 1, []),
        ([1.0, 1.5, 2.5], [1, 1, 1], 3, [0.5, 1.0]),
        ([1.0, 3.0], [1, 4], 5, [0.5] * 4),
        ([1.0, 3.0], [3, 1], 4, [0.0, 0.0, 2.0]),
        ([1.0, 3.0, 4.0], [1, 4, 2], 3, [1.0, 1.0]),  # a stop string has ended the answer
    ],
)
def test_there_is_a_gap_between_each_two_tokens(
    times: list[float], counts: list[int], tokens: int, gaps: list[float]
) -> None:
    assert list(token_gaps(times, counts, tokens)) == gaps
