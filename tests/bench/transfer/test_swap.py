from __future__ import annotations

import math

import pytest

from bench.transfer.swap import buckets, gaps, loading_times, make_rounds, quantile

METRICS = """
paceline:kv_swap_in_seconds_bucket{le="0.005",model_name="m",role="prefill",worker="prefill-0"} 9.0
paceline:kv_swap_in_seconds_bucket{le="0.005",model_name="m",role="decode",worker="decode-0"} 2.0
paceline:kv_swap_in_seconds_bucket{le="0.01",model_name="m",role="decode",worker="decode-0"} 8.0
paceline:kv_swap_in_seconds_bucket{le="+Inf",model_name="m",role="decode",worker="decode-0"} 10.0
"""


def test_a_quantile_lies_within_its_bucket() -> None:
    counts = buckets(METRICS)
    assert counts == {0.005: 2, 0.01: 8, math.inf: 10}
    assert quantile(counts, 0.5) == pytest.approx(0.0075)
    assert quantile(counts, 0.95) == 0.01  # the last finite bound: the histogram knows only that it took longer
    assert math.isnan(quantile({math.inf: 0.0}, 0.5))
    assert loading_times(counts).endswith("loaded: 10 times, p50 7.5 ms, p95 10.0 ms, p99 10.0 ms; 80.0% within 10 ms")
    assert loading_times({0.01: 0.0, math.inf: 0.0}).startswith("no block was loaded")


def test_the_gap_behind_a_first_token_is_told_apart() -> None:
    found = gaps([[1.0, 1.5, 1.6, 1.7], [2.0, 2.5], [3.0]])
    assert [found["join_ms_p50"], found["join_ms_p99"]] == pytest.approx([500, 500])
    assert [found["later_ms_p50"], found["later_ms_p99"]] == pytest.approx([100, 100])


def test_every_round_asks_for_the_same_prompts_in_another_order() -> None:
    rounds = make_rounds(prompts=5, prompt_tokens=7, tokens=3, rounds=2)
    asked = [[request.prompt for request in each.requests] for each in rounds]
    assert sorted(asked[0]) == sorted(asked[1]) == sorted(asked[2])
    assert asked[0] != asked[1]
