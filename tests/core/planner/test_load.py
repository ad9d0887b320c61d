"""Recent load and forecasts."""

from __future__ import annotations

import pytest

from paceline.core.planner.distribution import Distribution
from paceline.core.planner.load import ClassDemand, ClassLoad, LoadSample, Series
from paceline.core.planner.reports import Traffic


def traffic(arrivals: int, prompt: float = 100.0, **fields: int) -> Traffic:
    lengths = Distribution.of([prompt] * arrivals)
    return Traffic(5.0, arrivals, finished=arrivals, prompt_tokens=lengths, answer_tokens=lengths, **fields)


def load_of(*arrivals: int) -> ClassLoad:
    load = ClassLoad()
    for count in arrivals:
        load = load.add(traffic(count))
    return load


def test_the_first_rate_is_right_at_once() -> None:
    assert load_of(10).now().rate == pytest.approx(2.0)
    assert load_of(10).now().work("prefill") == pytest.approx(200.0)


def test_a_new_rate_replaces_the_old_one() -> None:
    load = load_of(*[10] * 20, *[50] * 20)
    assert load.now().rate == pytest.approx(10.0, rel=0.05)


def test_lengths_are_remembered_while_nothing_arrives() -> None:
    load = load_of(*[10] * 5, *[0] * 200)
    assert load.now().rate < 1e-6
    assert load.now().prompt_tokens.mean == pytest.approx(100.0)


def test_cached_tokens_are_no_work_for_prefill() -> None:
    load = ClassLoad().add(traffic(10, cached_tokens=750, started_tokens=1000))
    assert load.now().work("prefill") == pytest.approx(50.0)
    assert load.now().work("decode") == pytest.approx(200.0)


def test_a_rising_load_is_continued_and_a_falling_one_is_not() -> None:
    rising, falling = Series(), Series()
    for value in range(10):
        rising, falling = rising.add(10.0 * value, 2), falling.add(100.0 - 10 * value, 2)
    assert rising.forecast(2) > 95.0
    assert falling.forecast(2) == falling.level


def test_forecasts_that_were_too_low_make_the_next_ones_cautious() -> None:
    calm, wild = Series(), Series()
    for value in range(40):
        calm, wild = calm.add(10.0, 2), wild.add(30.0 if value % 8 > 5 else 10.0, 2)
    assert calm.caution() == pytest.approx(0.0, abs=1e-6)
    assert wild.caution() > 5.0
    assert len(wild.made) == 2
    assert len(wild.errors) <= 40


def test_chance_is_no_change_of_the_load() -> None:
    samples = [LoadSample.of(0.0, [load_of(*arrivals)], ["decode"]) for arrivals in ([9] * 10, [13] * 10, [90] * 10)]
    assert not samples[0].differs(samples[1], "decode")
    assert samples[0].differs(samples[2], "decode")
    assert samples[2].differs(samples[0], "decode")


def test_inputs_of_calls_are_work_for_pool_workers_as_prompts_are_for_prefill_workers() -> None:
    demand = ClassDemand(2.0, Distribution.of([300.0] * 5), 0.0, Distribution())
    assert demand.work("pool") == demand.work("prefill") > 500
