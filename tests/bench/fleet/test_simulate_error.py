"""Comparing simulations with measured runs."""

from __future__ import annotations

from array import array

import pytest

from bench.common.workloads import make_workload
from bench.fleet.simulate_error import Comparison, Run, Seen, compare, figures_of, report, simulate
from bench.fleet.simulate_loads import make_load
from paceline.core.step_times import Curve, Delay
from paceline.simulator.recorder import ClassRecord
from paceline.simulator.trace import LoadTrace, TraceRequest
from tests.simulator.tiny import profile, step_times, worker_times


def test_each_run_is_simulated_with_its_own_profile_and_an_empty_cache() -> None:
    trace = LoadTrace(16, [TraceRequest(0.0, 48, 2, [7, 8]), TraceRequest(5.0, 48, 2, [7, 8])])
    slower = worker_times(step_times(decode=Curve(points=((1, 0.022),))))
    profiles = [profile(gateway=Delay(seconds=0.1)), profile(decode=slower, gateway=Delay(seconds=0.3))]
    runs = [simulate(own, trace, aggregated=False, seed=1) for own in profiles]
    found = figures_of(runs)
    assert found["hit rate"] == pytest.approx(2 * 32 / (4 * 48))
    # 48 tokens take 48 ms, and the 16 that are not cached take 16 ms.
    assert list(runs[0].ttft) == pytest.approx([0.148, 0.116])
    assert found["TTFT p50"] == pytest.approx((0.148 + 0.316) / 2)
    assert (found["ITL p50"], found["ITL p99"]) == pytest.approx((0.011, 0.022), rel=0.01)


def test_bursts_of_32_are_those_of_the_workload_with_new_prompts() -> None:
    talks = make_load("burst-32", 30.0, seed=1).talks
    assert [talk.at for talk in talks] == [0.0] * 32 + [20.0] * 32
    lengths = [(len(turn.tokens), turn.answer_tokens) for talk in talks for turn in talk.turns]
    assert lengths == 2 * [(len(each.prompt), each.max_tokens) for each in make_workload("burst-32", 1).requests]
    assert len({turn.tokens for talk in talks for turn in talk.turns}) == 64


def test_the_figures_of_a_simulation_are_medians_over_its_seeds() -> None:
    def own(ttft: float) -> ClassRecord:
        return ClassRecord(prompt_tokens=10, ttft=array("d", [ttft]))

    seen = Seen([0.1], [0.01], [{"cached_tokens": 0, "input_length": 10}])
    runs = [Run(seen, [own(0.9), own(0.1), own(0.2)]), Run(seen, [own(0.1), own(0.3), own(0.2)])]
    assert compare(runs).simulated["TTFT p50"] == pytest.approx(0.2)
    assert compare(runs).simulated["TTFT p99"] == pytest.approx(0.298)


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
