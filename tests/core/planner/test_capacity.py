"""How many workers a load needs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.planner.capacity import (
    Places,
    Wanted,
    decode_workers,
    encode_workers,
    erlang_c,
    prefill_workers,
    running_sequences,
    sequences_per_worker,
)
from paceline.core.planner.distribution import Distribution
from paceline.core.planner.load import ClassDemand
from paceline.core.planner.objectives import Latency
from paceline.core.planner.step_fit import FittedStepTimes

PREFILL, DECODE = FittedStepTimes(0.01, 1e-4, 0.0, 2048), FittedStepTimes(0.01, 2e-4, 1e-7, 64)
PLACES = Places(64, 0.0)
LATENCY = Latency(ttft=1.0, itl=0.05)


def demand(rate: float, prompt: float = 1000.0, answer: float = 200.0) -> ClassDemand:
    return ClassDemand(rate, Distribution.of([prompt] * 20), 0.0, Distribution.of([answer] * 20), media_rate=rate)


def test_erlang_c_of_a_known_case() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)


@given(st.floats(0.1, 50), st.floats(1.1, 3.0))
def test_more_load_never_needs_fewer_workers(rate: float, more: float) -> None:
    few, many = [Wanted(demand(rate), LATENCY)], [Wanted(demand(rate * more), LATENCY)]
    assert prefill_workers(few, PREFILL) <= prefill_workers(many, PREFILL)
    assert encode_workers(few, PREFILL) <= encode_workers(many, PREFILL)
    assert decode_workers(few, DECODE, PREFILL, PLACES) <= decode_workers(many, DECODE, PREFILL, PLACES)


def test_no_load_needs_no_worker() -> None:
    nothing = [Wanted(demand(0.0), LATENCY)]
    assert prefill_workers(nothing, PREFILL) == decode_workers(nothing, DECODE, PREFILL, PLACES) == 0


def test_prefill_workers_have_room_above_their_work() -> None:
    classes = [Wanted(demand(40.0), LATENCY)]
    busy = 40 * PREFILL.seconds(1000, 0)
    assert busy < prefill_workers(classes, PREFILL) < 2 * busy


def test_a_few_prompts_longer_than_the_objective_do_not_need_every_worker_that_there_is() -> None:
    lengths = Distribution.of([100.0] * 96 + [100_000.0] * 4)  # the mean takes 0.4 s, and the 95th percentile 0.02 s
    classes = [Wanted(replace(demand(1.0), prompt_tokens=lengths), Latency(ttft=0.3))]
    assert prefill_workers(classes, PREFILL) < 50


def test_a_tail_of_long_prompts_needs_more_workers_than_its_mean() -> None:
    same = demand(13.0, prompt=2000.0)
    tail = replace(same, prompt_tokens=Distribution.of([1000.0] * 9 + [11_000.0]))
    assert tail.prompt_tokens.mean == same.prompt_tokens.mean
    latency = Latency(ttft=2.0)
    assert prefill_workers([Wanted(tail, latency)], PREFILL) > prefill_workers([Wanted(same, latency)], PREFILL)


def test_classes_are_sized_together() -> None:
    short, long = demand(5.0, prompt=100.0), demand(5.0, prompt=3000.0)
    lenient = prefill_workers([Wanted(short, Latency(ttft=20.0)), Wanted(long, Latency(ttft=20.0))], PREFILL)
    strict = prefill_workers([Wanted(short, Latency(ttft=0.1)), Wanted(long, Latency(ttft=20.0))], PREFILL)
    assert strict > lenient


def test_steps_are_kept_short_enough() -> None:
    most = sequences_per_worker([LATENCY, Latency(itl=0.02)], DECODE, Places(1000, 0), 0.0)
    assert DECODE.seconds(most, 0) <= 0.02
    assert sequences_per_worker([Latency()], DECODE, Places(10, 0), 0.0) == pytest.approx(9)
    assert sequences_per_worker([Latency()], DECODE, Places(100, 5000), 1000.0) == pytest.approx(4.5)
    assert sequences_per_worker([Latency(itl=0.001)], DECODE, PLACES, 0.0) == 1


@settings(max_examples=20)
@given(st.floats(1.0, 1000.0), st.floats(0.0, 2000.0))
def test_sequences_that_run_are_a_queue_that_shares_its_processor(tokens: float, context: float) -> None:
    mean, variance = running_sequences(tokens, DECODE, context)
    # The chance of n sequences, from the balance of arrivals and ends, if answers have exponential lengths.
    chances = [1.0]
    for n in range(1, 700):
        chances.append(chances[-1] * tokens * DECODE.seconds(n, n * context) / n)
    chances = [chance / math.fsum(chances) for chance in chances]
    expected = math.fsum(n * chance for n, chance in enumerate(chances))
    assert mean == pytest.approx(expected)
    squares = math.fsum((n - expected) ** 2 * chance for n, chance in enumerate(chances))
    assert variance == pytest.approx(squares)


def test_a_worker_that_is_nearly_always_busy_has_no_bound() -> None:
    assert running_sequences(5000.0, DECODE, 0.0) == (math.inf, math.inf)


def test_the_number_of_sequences_varies_less_with_many_workers() -> None:
    one, many = running_sequences(500.0, DECODE, 100.0), running_sequences(500.0, DECODE, 100.0, 100)
    assert many[1] < one[1] / 90


def test_decode_workers_hold_their_requests() -> None:
    rate, answer = 30.0, 200.0
    workers = decode_workers([Wanted(demand(rate, answer=answer), LATENCY)], DECODE, None, PLACES)
    per_worker = rate * answer / workers  # tokens per second
    running = per_worker * DECODE.fixed / (1 - per_worker * (DECODE.per_token + 1100 * DECODE.per_context))
    assert 0 < running < 64
    assert math.isfinite(workers)


def test_an_objective_that_nobody_can_keep_asks_for_no_endless_fleet() -> None:
    assert prefill_workers([Wanted(demand(5.0, prompt=50_000.0), Latency(ttft=0.01))], PREFILL) < 100


def test_places_are_taken_while_prompts_are_computed() -> None:
    classes = [Wanted(demand(10.0, prompt=10_000.0, answer=2.0), LATENCY)]
    few = Places(8, 0.0)
    busy = 10 * PREFILL.seconds(10_000, 0)  # prompts that are computed at the same time
    assert decode_workers(classes, DECODE, None, few) == 1
    assert decode_workers(classes, DECODE, PREFILL, few) > busy / 8
