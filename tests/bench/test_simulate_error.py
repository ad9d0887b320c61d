"""Comparing simulations with measured runs."""

from __future__ import annotations

import pytest

from bench.simulate_error import Comparison, one_after_another, report, simulate_all
from paceline.core.step_times import Delay
from paceline.simulator.trace import Trace, TraceRequest
from tests.simulator.tiny import profile


def test_runs_are_simulated_one_after_another_with_an_empty_cache_each() -> None:
    runs = [Trace(16, [TraceRequest(0.0, 48, 2, [7, 8]), TraceRequest(5.0, 48, 2, [7, 8])])] * 2
    together = list(one_after_another(runs))
    assert [request.arrival for request in together] == [0.0, 5.0, 65.0, 70.0]
    found = simulate_all(profile(gateway=Delay(seconds=0.1)), runs, aggregated=False)
    assert found["hit rate"] == pytest.approx(2 * 32 / (4 * 48))
    # 48 tokens take 48 ms, and the 16 that are not cached take 16 ms.
    assert found["TTFT p50"] == pytest.approx(0.1 + (0.048 + 0.016) / 2)
    assert found["ITL p50"] == pytest.approx(0.011, rel=0.01)


def test_the_report_says_how_far_runs_and_simulation_are_apart() -> None:
    own = Comparison({"TTFT p50": 0.1}, [{"TTFT p50": 0.08}, {"TTFT p50": 0.12}], {"TTFT p50": 0.11})
    assert [part.strip() for part in report({"chats": own}).splitlines()[-1].split("|")[1:-1]] == [
        "chats",
        "TTFT p50",
        "100.0 ms",
        "50%",
        "110.0 ms",
        "10%",
    ]
