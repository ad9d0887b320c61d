"""Whole simulations: small ones that can be calculated by hand, and what holds for all of them."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.planner.actions import Add, Decision, Drain, Flip, Hold
from paceline.core.planner.objectives import Latency, Objectives, RoleLimits
from paceline.core.planner.planner import Planner
from paceline.core.request_classes import BACKGROUND, NO_CLASSES, RequestClass
from paceline.core.step_times import Curve, Delay
from paceline.simulator.adapters import AdapterOptions
from paceline.simulator.answers import on_disaggregation
from paceline.simulator.gateway import GatewayOptions
from paceline.simulator.result import Result
from paceline.simulator.scenario import PlannedFailure, Scenario
from paceline.simulator.search import Found, cheapest
from paceline.simulator.series import SIZE, ratios_of
from paceline.simulator.simulation import Simulation, simulate
from paceline.simulator.trace import LoadTrace, TraceRequest
from tests.simulator.tiny import BLOCK, UNEVEN, profile, run, step_times, worker_times


def test_a_request_takes_its_prompt_a_handoff_and_its_steps() -> None:
    own = profile(gateway=Delay(seconds=0.5), first_token=Delay(seconds=0.25), handoff=Delay(seconds=0.125))
    _, result = run([TraceRequest(1.0, 40, 5)], profile=own)
    (only,) = result.classes.values()
    # 40 tokens take 40 ms; the first of four decode steps begins with the handoff, and each takes 11 ms.
    assert only.ttft.p50 == pytest.approx(0.5 + 0.040 + 0.25)
    assert only.seconds.p50 == pytest.approx(0.5 + 0.040 + 0.125 + 4 * 0.011)
    assert result.seconds == pytest.approx(1.0 + only.seconds.p50)
    assert result.device_seconds == pytest.approx(2 * result.seconds)


def test_a_prefix_is_cached_after_the_first_request() -> None:
    requests = [TraceRequest(0.0, 70, 2, (1, 2, 3, 4)), TraceRequest(1.0, 70, 2, (1, 2, 3, 9))]
    _, result = run(requests)
    (only,) = result.classes.values()
    assert only.hit_rate == pytest.approx(48 / 140)
    assert only.ttft.p50 == pytest.approx(0.070)
    assert only.ttft.mean == pytest.approx((0.070 + 0.022) / 2)


def test_a_missing_adapter_is_read_first() -> None:
    options = AdapterOptions(max_cpu_loras=1, seconds=0.5)
    requests = [TraceRequest(float(2 * number), 40, 2, adapter=adapter) for number, adapter in enumerate((7, 7, 8, 0))]
    _, result = run(requests, adapters=options)
    (only,) = result.classes.values()
    # The decode worker reads it before it admits, and then the prefill worker.
    assert only.ttft.mean == pytest.approx((1.040 + 0.040 + 1.040 + 0.040) / 4)
    assert result.adapter_loads == 4


def test_requests_wait_for_a_worker_with_a_place_for_their_adapter() -> None:
    options = AdapterOptions(max_cpu_loras=1, seconds=0.0)
    _, result = run([TraceRequest(0.0, 10, 100, adapter=1), TraceRequest(0.1, 10, 2, adapter=2)], adapters=options)
    (only,) = result.classes.values()
    assert only.requests == 2
    assert only.refused == 0
    assert only.ttft.p99 > 0.9  # after the first one has ended


def test_requests_go_to_workers_that_have_their_adapter() -> None:
    requests = [TraceRequest(0.5 * number, 40, 2, adapter=1 + number % 4) for number in range(40)]
    for most in (4, 1):
        options = AdapterOptions(max_cpu_loras=most, seconds=0.2)
        _, result = run(requests, prefill=4, decode=4, adapters=options)
        # Each role needs four readings. Without regard to adapters, there are about 80 if only one fits.
        assert 8 <= result.adapter_loads <= 12


def test_requests_are_spread_over_workers_between_heartbeats() -> None:
    """Eight requests in 80 ms take two each of four workers of both roles, so no step has more than two rows."""
    requests = [TraceRequest(0.01 * number, 60, 20) for number in range(8)]
    _, result = run(requests, prefill=4, decode=4)
    (only,) = result.classes.values()
    assert only.ttft.p99 <= 0.121
    assert only.mean_itl.p99 <= 0.0126


def test_prompts_between_hosts_wait_for_the_network() -> None:
    # 1000 bytes for each of 100 tokens at 1 MB/s take 100 ms, which begin with the prompt; it is computed after 100 ms,
    # and then its last chunk of 50 tokens still takes 50 ms to come, and 10 ms more.
    _, result = run([TraceRequest(0.0, 100, 2)], workers_per_host=1)
    (only,) = result.classes.values()
    assert only.seconds.p50 == pytest.approx(0.100 + 0.050 + 0.010 + 0.011)


def test_the_gateway_knows_how_many_tokens_are_cached_in_blocks_of_any_size() -> None:
    requests = [TraceRequest(at, 270, 5, blocks=[1, 2, 3, 4]) for at in (0.0, 10.0)]
    simulation = Simulation(Scenario(profile(), prefill=1, decode=1), LoadTrace(64, requests))
    simulation.run()
    # The first prompt takes five steps of 64 tokens. Of the second one, 14 tokens are left, and decode computes them.
    (prefill,) = (each for each in simulation.fleet.workers.values() if each.role == "prefill")
    assert prefill.steps == 5


def test_an_aggregated_worker_delays_decoding_by_prompts() -> None:
    requests = [TraceRequest(0.0, 10, 20), TraceRequest(0.1, 60, 1)]
    _, apart = run(requests)
    _, together = run(requests, prefill=0, is_aggregated=True)
    assert max(own.seconds.p99 for own in apart.classes.values()) == pytest.approx(0.010 + 19 * 0.011)
    assert max(own.seconds.p99 for own in together.classes.values()) == pytest.approx(0.010 + 19 * 0.011 + 0.060)


def test_an_arrival_delays_the_prompt_under_way() -> None:
    own = worker_times(arrival=0.020)
    _, result = run([TraceRequest(0.0, 60, 1), TraceRequest(0.030, 60, 1)], profile=profile(own, own))
    (only,) = result.classes.values()
    assert only.ttft.mean == pytest.approx((0.080 + 0.110) / 2)


def test_requests_wait_in_order_and_are_refused_when_they_waited_too_long() -> None:
    slow = worker_times(max_seqs=1)
    requests = [TraceRequest(0.001 * number, 10, 11) for number in range(3)]
    _, result = run(requests, profile=profile(slow, slow), gateway=GatewayOptions(queue_seconds=0.2))
    (only,) = result.classes.values()
    assert (only.finished, only.refused) == (2, 1)
    assert only.queued.p99 == pytest.approx(0.010 + 10 * 0.011 - 0.001)


def test_short_prompts_do_not_wait_behind_long_ones() -> None:
    """A token of a prompt takes 1 ms. A short prompt waits for the step under way and for a long prompt that is nearly
    done, each at most a whole step of 256 tokens. Then half a step is its own."""
    long = [TraceRequest(0.0, 1600, 2, group="long") for _ in range(3)]
    short = [TraceRequest(0.5 + number, 60, 2, group="short") for number in range(4)]
    workers = worker_times(max_seqs=64, max_batched_tokens=256)
    _, result = run([*long, *short], profile=profile(workers, workers))
    assert result.classes["short"].ttft.p99 <= 0.256 + 0.256 + 0.128
    assert result.classes["long"].ttft.mean <= (1.7 + 3.4 + 5.1) / 3


def test_requests_that_would_miss_their_objective_are_refused_and_the_urgent_come_first() -> None:
    """A prompt takes 0.1 s, and 20 of each kind come in a second: twice as many as can be computed."""
    classes = {**NO_CLASSES, "chat": RequestClass(ttft_seconds=1.0)}
    requests = [
        TraceRequest(0.05 * number, 100, 2, (), "chat", owner=("a", "b")[number % 2], priority=number % 2)
        for number in range(200)
    ]
    _, result = run(requests, gateway=GatewayOptions(classes=classes))
    (only,) = result.classes.values()
    assert set(only.refusals) <= {"overload", "priority"}
    assert only.finished + only.refused == 200
    assert 90 <= only.finished <= 110
    assert only.ttft.p95 <= 1.0


def test_keys_share_a_full_fleet_and_refused_clients_come_back() -> None:
    """One key sends 40 requests at once, and another one then 5. They are served in turn."""
    slow = worker_times(max_seqs=1)
    greedy = [TraceRequest(0.0, 100, 2, (), "greedy", owner="a") for _ in range(40)]
    modest = [TraceRequest(0.01, 100, 2, (), "modest", owner="b") for _ in range(5)]
    options = GatewayOptions(max_waiting=30, retries=9)
    _, result = run([*greedy, *modest], profile=profile(slow, slow), gateway=options)
    assert {name: own.finished for name, own in result.classes.items()} == {"greedy": 40, "modest": 5}
    assert result.classes["modest"].seconds.p99 < 2.0 < result.classes["greedy"].seconds.p50


def test_a_request_that_is_too_long_does_not_hold_up_others() -> None:
    slow = worker_times(max_seqs=1)
    requests = [TraceRequest(0.0, 40, 20), TraceRequest(0.01, 4000, 100), TraceRequest(0.02, 40, 20)]
    _, result = run(requests, profile=profile(slow, slow, max_model_len=4096))
    (only,) = result.classes.values()
    assert (only.finished, only.refusals) == (2, {"too long": 1})
    assert result.seconds < 1.0


@pytest.mark.parametrize("group", ["", BACKGROUND])
def test_a_simulation_ends_although_all_workers_have_failed(group: str) -> None:
    requests = [TraceRequest(0.0, 40, 200, (), group), TraceRequest(3.0, 40, 200, (), group)]
    _, result = run(requests, failures=(PlannedFailure(1.0, 1.0),), restarts=False)
    (only,) = result.classes.values()
    assert (only.finished, only.refused) == (0, 2)


def test_workers_that_fail_lose_no_request() -> None:
    requests = [TraceRequest(0.01 * number, 40, 30) for number in range(8)]
    _, result = run(requests, decode=2, failures=(PlannedFailure(0.2, 0.4),))
    (only,) = result.classes.values()
    assert (only.finished, only.refused) == (8, 0)
    assert only.attempts > 8


def test_a_sequence_that_needs_blocks_takes_them_from_the_newest() -> None:
    requests = [TraceRequest(0.0, 100, 120), TraceRequest(0.01, 100, 120)]
    _, result = run(requests, host_tokens=400)
    (only,) = result.classes.values()
    assert only.finished == 2
    assert result.preemptions == 1


class Script(Planner):
    """A planner that decides what it was told, once each."""

    actions: ClassVar[list[Add | Drain | Flip]]

    def decide(self, report):  # type: ignore[no-untyped-def]
        wanted = {role: seen.wanted for role, seen in report.roles.items()}
        action = self.actions.pop(0) if self.actions else Hold("done")
        if not isinstance(action, Hold | Flip):
            wanted[action.role] = action.count
        return Decision(report.at, report.revision, wanted, (action,), action.reason)


def test_the_planners_actions_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.simulator.simulation.Planner", Script)
    flip, less = Flip("w00000", "decode", "prefill", "flip"), Drain("prefill", 1, "", "less")
    monkeypatch.setattr(Script, "actions", [Add("decode", 2, "more"), flip, less], raising=False)
    requests = [TraceRequest(0.5 * number, 10, 100) for number in range(300)]
    _, result = run(requests, plans=True, objectives=Objectives(fast_seconds=40.0))
    (only,) = result.classes.values()
    assert (only.finished, only.refused) == (300, 0)
    seen = {(level.prefill, level.decode) for level in result.levels}
    assert [decision.line for decision in result.decisions] == ["more", "flip", "less"]
    assert seen >= {(1, 1), (1, 2), (2, 1), (1, 1)}
    assert [level.decode for level in result.levels if level.at in (60.0, 70.0, 90.0)] == [1, 2, 1]


def test_the_planner_follows_a_load_that_one_worker_of_each_role_cannot_serve() -> None:
    """Prompts of 400 tokens take 0.4 s and come four times a second."""
    limits = RoleLimits(1, 8)
    objectives = Objectives(roles={"prefill": limits, "decode": limits}, default=Latency(ttft=3.0, itl=0.1))
    requests = [TraceRequest(0.25 * number, 400, 20) for number in range(1600)]
    _, result = run(requests, plans=True, objectives=objectives)
    (only,) = result.classes.values()
    assert (only.finished, only.refused) == (1600, 0)
    assert max(level.prefill for level in result.levels) > 2
    last = result.levels[-1]
    assert 2 <= last.prefill < 8
    assert 2 <= last.decode < 8
    # Each role has grown to its size and shrunk to it, and has come to rest.
    assert result.decisions[-1].at < 300


requests_of = st.lists(
    st.builds(
        TraceRequest,
        st.floats(0, 3),
        st.integers(1, 300),
        st.integers(1, 80),
        st.lists(st.integers(0, 3), max_size=18).map(lambda parts: tuple(_chain(parts))),
        st.sampled_from(["", "batch"]),
        adapter=st.sampled_from([0, 0, 1, 2, 3]),
    ),
    min_size=1,
    max_size=30,
).map(lambda found: sorted(found, key=lambda request: request.arrival))
scenarios = st.builds(
    Scenario,
    st.sampled_from(
        [
            profile(),
            profile(
                worker_times(step_times(prefill_spread=UNEVEN)),
                worker_times(step_times(decode_spread=UNEVEN, decode_context=1e-5)),
            ),
        ]
    ),
    prefill=st.integers(0, 3),
    decode=st.integers(1, 3),
    is_aggregated=st.booleans(),
    adapters=st.sampled_from([AdapterOptions(), AdapterOptions(max_cpu_loras=1, seconds=0.3)]),
    workers_per_host=st.sampled_from([1, 2, 8]),
    host_tokens=st.sampled_from([600, 2000, 0]),
    cache_policy=st.sampled_from(["lru", "adaptive"]),
    gateway=st.builds(GatewayOptions, queue_seconds=st.sampled_from([0.5, 60.0])),
    failures=st.sampled_from([(), (PlannedFailure(1.0, 0.5),), (PlannedFailure(0.5, 1.0),)]),
)


def _chain(parts: list[int]) -> list[int]:
    """Return names of blocks that stand for all parts before them, too."""
    return [int("1" + "".join(map(str, parts[: end + 1])), 4) for end in range(len(parts))]


# In one step, the last request ends, and another one needs its blocks.
ENDS_WHILE_ANOTHER_GROWS = (
    Scenario(
        profile(worker_times(), worker_times(step_times(decode_spread=UNEVEN, decode_context=1e-5))),
        prefill=0,
        decode=2,
        host_tokens=600,
        gateway=GatewayOptions(queue_seconds=0.5),
        failures=(PlannedFailure(1.0, 0.5),),
    ),
    [
        *[TraceRequest(0.0, 1, 1, ())] * 6,
        *[TraceRequest(1.0, 1, 1, ())] * 4,
        TraceRequest(1.0, 244, 61, ()),
        TraceRequest(1.90625, 161, 11, ()),
    ],
)


@settings(max_examples=30, deadline=None)
@given(scenarios, requests_of)
@example(*ENDS_WHILE_ANOTHER_GROWS)
def test_every_request_ends_once_and_every_block_comes_back(scenario: Scenario, requests: list[TraceRequest]) -> None:
    simulation = Simulation(scenario, LoadTrace(BLOCK, requests))
    result = simulation.run()
    for group, own in result.classes.items():
        mine = [request for request in requests if request.group == group]
        assert own.requests == len(mine)
        assert own.finished + own.refused == own.requests
        assert sum(minute.arrivals for minute in own.minutes) == own.requests
        assert own.finished == 0 or own.ttft.p50 <= own.seconds.p99
    assert all(before.at < after.at for before, after in zip(result.levels, result.levels[1:]))
    simulation.events.run(lambda: False)  # workers start, and blocks of failed ones come back
    for host in simulation.fleet.hosts:
        assert host.ledger.check() == []
        assert host.ledger.leases() == []
    for worker in simulation.fleet.workers.values():
        assert (worker.has_work, worker.queued_tokens, len(worker.admitted)) == (False, 0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_equal_scenarios_have_equal_results_and_coalescing_does_not_change_them(seed: int) -> None:
    """Instants are random, because the order of events at one instant may depend on rounding."""
    chance = random.Random(seed)
    arrivals = sorted(chance.uniform(0, 3) for _ in range(40))
    requests = [
        TraceRequest(at, chance.randint(1, 300), chance.randint(1, 80), tuple(_chain(chance.choices(range(3), k=4))))
        for at in arrivals
    ]
    own = worker_times(step_times(prefill_spread=UNEVEN, decode_spread=UNEVEN, decode_context=1e-5))
    whole = profile(own, own, token=Delay(seconds=0.004, spread=UNEVEN))
    scenario = Scenario(
        whole, 2, 2, is_aggregated=seed % 2 > 0, failures=(PlannedFailure(chance.uniform(0.5, 1), 0.3),)
    )
    trace = LoadTrace(BLOCK, requests)
    result = simulate(scenario, trace)
    assert simulate(scenario, trace).to_json() == result.to_json()
    (one,) = result.classes.values()
    (other,) = simulate(dataclasses.replace(scenario, is_coalesced=False), trace).classes.values()
    for name in ("seconds", "itl"):
        percentiles = [dataclasses.asdict(getattr(own, name)) for own in (one, other)]
        assert percentiles[0] == pytest.approx(percentiles[1])
    assert (one.finished, one.hit_rate, one.attempts) == (other.finished, other.hit_rate, other.attempts)


@pytest.mark.parametrize(("seconds", "median"), [(0.004, 0.011), (0.040, 0.0)])
def test_tokens_that_come_late_change_the_gaps_but_not_their_mean(seconds: float, median: float) -> None:
    """If delays are much longer than steps, most tokens come together with a late one before them."""
    _, result = run([TraceRequest(0.0, 16, 2000)], profile=profile(token=Delay(seconds=seconds, spread=UNEVEN)))
    (own,) = result.classes.values()
    assert own.itl.p50 == pytest.approx(median, rel=0.01)
    assert own.itl.p99 > 0.011 + seconds
    assert own.itl.mean == pytest.approx(0.011, rel=0.01)


@pytest.mark.parametrize("seed", [0, 7])
def test_the_delays_of_tokens_do_not_follow_the_times_of_steps(seed: int) -> None:
    simulation, _ = run([TraceRequest(0.0, 16, 2)], profile=profile(token=Delay(seconds=1.0, spread=UNEVEN)), seed=seed)
    delays = simulation.recorder.token_ratios.values(0, SIZE)
    for other in range(seed, seed + 4):  # prompts, decoding, and steps beside prefill on the first hosts
        assert abs(np.corrcoef(delays, ratios_of(UNEVEN, other).values(0, SIZE))[0, 1]) < 0.1


def test_the_cheapest_fleet_is_found() -> None:
    """Eight requests a second take 100 ms for a prompt and 50 steps of 20 ms, so they need nine of the four places that
    each decode worker has."""
    steps = step_times(decode=Curve(points=((1, 0.02),)))
    workers = worker_times(steps)
    scenario = Scenario(
        profile(workers, workers), 1, 1, objectives=Objectives(default=Latency(ttft=1.0, itl=0.05, percentile=0.95))
    )
    requests = [TraceRequest(number / 8, 100, 51) for number in range(80)]
    tried: list[tuple[int, int]] = []

    def attempt(own: Scenario) -> Result:
        tried.append((own.prefill, own.decode))
        return simulate(own, LoadTrace(BLOCK, requests))

    found = cheapest(scenario, attempt)
    assert found.result.is_met
    assert (found.scenario.prefill, found.scenario.decode) == (1, 3)
    assert len(set(tried)) == len(tried) < 10
    with pytest.raises(ConfigError, match="more would not help"):
        cheapest(dataclasses.replace(scenario, objectives=Objectives(default=Latency(ttft=0.01))), attempt)


def test_the_search_goes_on_while_more_workers_are_faster_although_no_request_is_good_yet() -> None:
    """Twelve answers at once: a step takes 11 ms with one row, and 12 ms with two."""
    own = profile(worker_times(max_seqs=16), worker_times(max_seqs=16))
    scenario = Scenario(own, 1, 1, objectives=Objectives(default=Latency(itl=0.0115)))
    requests = [TraceRequest(0.0, 1, 100)] * 12
    results = [simulate(dataclasses.replace(scenario, decode=count), LoadTrace(BLOCK, requests)) for count in (1, 2)]
    assert [own.good for result in results for own in result.classes.values()] == [0, 0]
    assert cheapest(scenario, lambda own: simulate(own, LoadTrace(BLOCK, requests))).result.is_met


def test_the_comparison_says_what_pays() -> None:
    requests = [TraceRequest(0.05 * number, 60, 40) for number in range(60)]
    scenario = Scenario(profile(), 1, 1, objectives=Objectives(default=Latency(ttft=0.5, itl=0.02)))
    apart = Found(scenario, simulate(scenario, LoadTrace(BLOCK, requests)))
    alike = dataclasses.replace(scenario, is_aggregated=True)
    together = Found(alike, simulate(alike, LoadTrace(BLOCK, requests)))
    told = on_disaggregation(apart, together)
    assert told.startswith("Disaggregation ")
    swapped = on_disaggregation(together, apart)
    assert ("does not pay" in told) == (" pays " in swapped)


def test_the_result_is_json() -> None:
    _, result = run([TraceRequest(0.0, 40, 5)])
    values = json.loads(result.to_json())
    assert values["classes"][""]["requests"] == 1
    assert values["levels"][0]["prefill"] == 1


@pytest.mark.parametrize("text", ["half@10", "0.5", "2@10", "0.5@-1"])
def test_wrong_failures_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--fail"):
        PlannedFailure.parse(text)


def test_a_fleet_without_decode_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="--decode 1"):
        Scenario(profile(), 1, 0).check()
