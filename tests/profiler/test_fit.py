"""Fitting step times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.step_record import StepRecord
from paceline.profiler.fit import fit, fit_steps, spread_of, with_gaps


def prompt_row(tokens: int, before: int, seconds: float) -> StepRecord:
    return StepRecord(0, 0.0, seconds, tokens, tokens * before + tokens * (tokens + 1) // 2, 0, 0, 0)


def decode_row(sequences: int, context: int, seconds: float, number: int = 0, ended: float = 0.0) -> StepRecord:
    return StepRecord(number, ended, seconds, 0, 0, sequences, 0, context)


@settings(max_examples=30, deadline=None)
@given(
    base=st.floats(0.001, 0.05),
    each=st.floats(0, 0.001),
    slope=st.floats(0, 1e-6),
    seed=st.integers(0, 1000),
)
def test_a_fit_finds_the_function_although_some_steps_were_slow(
    base: float, each: float, slope: float, seed: int
) -> None:
    source = random.Random(seed)
    work = [float(source.choice((1, 2, 4, 8, 16))) for _ in range(200)]
    other = [float(source.randrange(4000)) for _ in work]
    exact = [base + each * x + slope * z for x, z in zip(work, other)]
    noisy = [y * (5 if source.random() < 0.05 else source.uniform(0.98, 1.02)) for y in exact]
    found = fit(work, other, noisy)
    for x, z, y in zip(work, other, exact):
        assert found.at(x, z) == pytest.approx(y, rel=0.05)
    assert found.quality.median < 0.03
    assert found.spread.at(0.5) == pytest.approx(1, abs=0.03)
    assert found.spread.at(1.0) > 4


def test_steps_of_both_kinds_and_what_a_mixed_step_saves() -> None:
    prompts = [
        prompt_row(tokens, before, 0.01 + 2e-4 * tokens + 1e-7 * (tokens * before + tokens**2 / 2))
        for tokens in (16, 64, 256, 512)
        for before in (0, 0, 512, 1024)
    ]
    decoding = [
        decode_row(rows, context * rows, 0.009 + 0.001 * rows + 1e-7 * context * rows)
        for rows in (1, 2, 4, 8)
        for context in (50, 100, 1000, 2000)
    ]
    mixed = StepRecord(0, 0.0, 0.013 + 0.01 + 2e-4 * 64 - 0.008, 64, 64 * 65 // 2, 4, 0, 400)
    times, quality = fit_steps(prompts, decoding, [mixed])
    assert times.prefill_seconds(128, 128 * 64) == pytest.approx(0.01 + 2e-4 * 128 + 1e-7 * 128 * 64, rel=0.05)
    assert times.decode_seconds(4, 400) == pytest.approx(0.01304, rel=0.01)
    assert times.decode_seconds(16, 16_000) == pytest.approx(0.0266, rel=0.05)
    assert times.shared == pytest.approx(0.008, abs=0.001)
    assert quality["prompts"].p99 < 0.05


def test_the_time_between_two_steps_counts() -> None:
    rows = [decode_row(1, 10 + number, 0.01, number, 0.012 * number) for number in range(9)]
    rows.append(decode_row(1, 10, 0.01, 20, 5.0))  # it had to wait for work
    assert [row.seconds for row in with_gaps(rows)] == pytest.approx([0.012] * 10)


def test_the_time_until_another_prompt_comes_is_no_time_between_two_steps() -> None:
    ends = {0: 0.1, 1: 0.28, 2: 0.383, 3: 0.56}
    rows = [prompt_row(100, 100 * (number == 2), 0.1)._replace(number=number, ended=ends[number]) for number in ends]
    assert [row.seconds for row in with_gaps(rows)] == pytest.approx([0.103] * 4)
    alone = [rows[0], rows[1], rows[3]._replace(number=2)]
    assert [row.seconds for row in with_gaps(alone)] == [0.1] * 3


def test_a_spread_has_no_more_levels_than_values() -> None:
    assert spread_of([1.0]).quantiles == (1.0, 1.0)
    assert len(spread_of([1.0] * 1000).quantiles) == 201
    assert spread_of([0.5, 1.0, 2.0]).at(0.5) == 1.0
