"""The last hour in bins. Instants are of an imagined clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.telemetry.history import BIN_SECONDS, BINS, COLUMNS, ConsoleHistory, Counters, Levels

NOW = 100_000.0
WORKER = ("decode-0", 1)


def rows(history: ConsoleHistory) -> dict[int, dict[str, Any]]:
    return {int(row[0] or 0): dict(zip(COLUMNS, row[1:], strict=True)) for row in history.rows()}


def test_a_gap_counts_in_the_bin_of_its_end() -> None:
    history = ConsoleHistory()
    history.observe(NOW, [NOW + 1, NOW + 2, NOW + 12], NOW + 12, has_failed=False)
    first, second = rows(history).values()
    assert (first["ended"], second["ended"]) == (0, 1)
    assert first["ttft_p50"] == pytest.approx(1, rel=0.05)
    assert first["itl_p99"] == pytest.approx(1, rel=0.05)
    assert (second["ttft_p50"], second["itl_p50"]) == (None, pytest.approx(10, rel=0.05))


def test_failures_are_counted_with_the_ended() -> None:
    history = ConsoleHistory()
    history.observe(NOW, [], NOW, has_failed=True)
    history.observe(NOW, [], NOW, has_failed=False)
    (row,) = rows(history).values()
    assert (row["ended"], row["failed"]) == (2, 1)


def test_rates_are_of_the_time_between_two_samples() -> None:
    history = ConsoleHistory()
    history.sample(NOW, Levels(), {WORKER: Counters(generated_tokens=500, prompt_tokens=100, found_tokens=90)})
    later = Counters(generated_tokens=600, prompt_tokens=180, found_tokens=110, draft_tokens=8, accepted_tokens=2)
    history.sample(
        NOW + BIN_SECONDS, Levels(running=3, waiting=1, blocks=10, used_blocks=4, cached_blocks=5), {WORKER: later}
    )
    before, row = rows(history).values()
    assert before["generated_tokens_per_s"] is None
    assert (row["generated_tokens_per_s"], row["prompt_tokens_per_s"]) == (10, 8)
    assert (row["hit_rate"], row["accepted_rate"]) == (0.25, 0.25)
    assert (row["running"], row["waiting"], row["kv_used"], row["kv_cached"]) == (3, 1, 0.4, 0.5)


def test_a_worker_that_restarts_or_joins_counts_from_the_next_sample() -> None:
    history = ConsoleHistory()
    history.sample(NOW, Levels(), {WORKER: Counters(generated_tokens=1000)})
    again, new = ("decode-0", 2), ("decode-1", 1)
    history.sample(NOW + 10, Levels(), {again: Counters(generated_tokens=50), new: Counters(generated_tokens=70)})
    history.sample(NOW + 20, Levels(), {again: Counters(generated_tokens=60), new: Counters(generated_tokens=90)})
    assert [row["generated_tokens_per_s"] for row in rows(history).values()] == [None, 0, 3]


def test_only_changed_rows_are_taken() -> None:
    history = ConsoleHistory()
    history.sample(NOW, Levels(), {})
    assert len(history.take_changed()) == 1
    history.sample(NOW + 10, Levels(), {})
    history.observe(NOW, [NOW + 1], NOW + 11, has_failed=False)
    changed = history.take_changed()
    assert [row[0] for row in changed] == [NOW / BIN_SECONDS, NOW / BIN_SECONDS + 1]
    assert history.take_changed() == []


def test_latencies_are_of_the_last_seconds() -> None:
    history = ConsoleHistory()
    history.observe(NOW, [NOW + 4], NOW + 4, has_failed=False)
    history.observe(NOW + 600, [NOW + 601], NOW + 601, has_failed=False)
    recent, hour = (history.latencies(NOW + 602, seconds)["ttft"] for seconds in (300, 3600))
    assert (recent["count"], hour["count"]) == (1, 2)
    assert recent["p99"] == pytest.approx(1, rel=0.05)
    assert hour["p99"] == pytest.approx(4, rel=0.05)
    assert history.latencies(NOW + 602, 300)["itl"] == {"count": 0, "p50": None, "p90": None, "p99": None}


@given(st.lists(st.floats(0, 20_000), max_size=60))
def test_never_more_than_an_hour_is_kept(ends: list[float]) -> None:
    history, now = ConsoleHistory(), 0.0
    for seconds in sorted(ends):
        now = NOW + seconds
        history.observe(now - 7200, [now - 5000, now - 4000, now - 1], now, has_failed=False)
        history.sample(now, Levels(), {})
    kept = [int(row[0] or 0) for row in history.rows()]
    assert len(kept) <= BINS
    assert all(now // BIN_SECONDS - index < BINS for index in kept)
