"""Simulations of workers that share the cores of their host, small enough to be calculated by hand."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.step_times import Curve, Delay, TurnTimes
from paceline.simulator.scenario import Scenario
from paceline.simulator.simulation import Simulation, simulate
from paceline.simulator.trace import LoadTrace, TraceRequest
from tests.simulator.tiny import BLOCK, profile, run, worker_times


def test_shared_cores_take_turns() -> None:
    """While a prompt waits, decode leaves half of each step's time to it, so its 60 ms take ten steps."""
    own = worker_times(planned_steps=0)
    turns = TurnTimes(itl_target=0.0, least_share=0.5)
    requests = [TraceRequest(0.0, 10, 40), TraceRequest(0.1, 60, 1)]
    _, result = run(requests, profile=profile(own, own, turns=turns))
    (only,) = result.classes.values()
    assert only.ttft.p99 == pytest.approx(0.060 + 11 * 0.011, abs=0.012)
    assert only.seconds.p99 == pytest.approx(0.010 + 39 * 0.011 + 0.060)
    assert only.itl.p50 == pytest.approx(0.011, rel=0.01)
    assert only.itl.p90 == pytest.approx(0.011 + 0.0055, rel=0.01)
    assert only.itl.mean == pytest.approx(0.011 + 0.060 / 39)


def test_workers_that_share_cores_are_one_of_each_role_on_a_host_and_share_a_device() -> None:
    scenario = Scenario(profile(turns=TurnTimes()), 3, 1)
    simulation = Simulation(scenario, LoadTrace(BLOCK, [TraceRequest(0.0, 40, 5)]))
    result = simulation.run()
    assert sorted(map(simulation.fleet.count_residents, simulation.fleet.hosts)) == [1, 1, 2]
    assert result.device_seconds == pytest.approx(3 * result.seconds)
    together = scenario.together()
    assert (together.prefill, together.decode, together.is_aggregated) == (0, 3, True)
    assert simulate(together, LoadTrace(BLOCK, [TraceRequest(0.0, 40, 5)])).levels[0].devices == 3


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0.060 + 10.9 * 0.011),
        ({"admit": Delay(seconds=0.050)}, 0.060 + 10.9 * 0.011 + 0.050),
        ({"late": Delay(seconds=0.0055)}, 0.060 + 5.5 * 0.011),
        ({"prefill_speed": Curve(points=((1, 2.0),))}, 0.060 / 2 + 5.5 * 0.011),
        ({"prefill_speed": Curve(points=((1, 0.5),))}, 0.060 * 2 + 21.8 * 0.011),
        # The time that decode leaves grows with the median of its recent steps, so the first four steps leave less.
        ({"decode": Curve(points=((1, 0.022),))}, 0.060 + 7.5 * 0.022),
    ],
)
def test_what_prefill_and_decode_cost_each_other_on_shared_cores(fields: dict[str, Any], seconds: float) -> None:
    own = worker_times(planned_steps=0)
    turns = TurnTimes(itl_target=0.0, least_share=0.5, **fields)
    requests = [TraceRequest(0.0, 10, 60), TraceRequest(0.1, 60, 1)]
    _, result = run(requests, profile=profile(own, own, turns=turns))
    (only,) = result.classes.values()
    assert only.ttft.p99 == pytest.approx(seconds, abs=0.022)  # it depends on where in a turn the prompt comes


def test_a_backlog_of_prompts_gets_more_of_the_cores() -> None:
    """For two seconds, decode leaves a third of the time to prefill, and three quarters from then on."""
    own = worker_times(planned_steps=0)
    turns = TurnTimes(itl_target=0.0, least_share=0.5, backlog_share=3.0)
    requests = [TraceRequest(0.0, 10, 400), TraceRequest(0.1, 2000, 1)]
    _, result = run(requests, profile=profile(own, own, turns=turns))
    (only,) = result.classes.values()
    assert only.ttft.p99 == pytest.approx(2.0 + (2.0 - 2.0 / 3) / 0.75, rel=0.05)


def test_prompts_with_a_pause_between_them_are_no_backlog() -> None:
    own = worker_times(planned_steps=0)
    turns = TurnTimes(itl_target=0.0, least_share=0.5, backlog_share=3.0)
    requests = [TraceRequest(0.0, 10, 400), TraceRequest(0.1, 500, 1), TraceRequest(1.9, 500, 1)]
    requests += [TraceRequest(20.0, 10, 200), TraceRequest(20.015, 500, 1)]  # after a time without any work
    _, result = run(requests, profile=profile(own, own, turns=turns))
    (only,) = result.classes.values()
    assert only.ttft.p50 == pytest.approx(1.5, rel=0.05)
    assert only.ttft.p99 == pytest.approx(1.5, rel=0.05)


def test_the_measured_rate_of_a_prefill_worker_includes_the_turns_of_others() -> None:
    """It says when the gateway gives the worker its next prompt."""
    own = worker_times(planned_steps=0, max_batched_tokens=256)
    turns = TurnTimes(itl_target=0.0, least_share=0.5)
    requests = [TraceRequest(0.0, 10, 60), TraceRequest(0.1, 128, 1)]
    simulation, _ = run(requests, profile=profile(own, own, turns=turns))
    (rate,) = (each.tokens_per_second for each in simulation.fleet.workers.values() if each.role == "prefill")
    assert rate == pytest.approx(1000 / 3, rel=0.1)


def test_admissions_at_the_same_time_take_longer_on_shared_cores() -> None:
    own = profile(admit=Delay(seconds=0.030), turns=TurnTimes(admission=0.020))
    _, result = run([TraceRequest(0.0, 10, 1), TraceRequest(0.0, 10, 1), TraceRequest(1.0, 10, 1)], profile=own)
    (only,) = result.classes.values()
    # Both are admitted after 50 ms, and their prompts are computed one after the other.
    assert only.ttft.mean == pytest.approx((0.060 + 0.070 + 0.040) / 3)
