"""Step times learned from steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.planner.distribution import Distribution
from paceline.core.planner.reports import Steps
from paceline.core.planner.step_fit import StepFit


def steps(tokens: float, context: float, seconds: float) -> Steps:
    return Steps(tokens, context, Distribution.of([seconds] * 20))


@given(st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2), st.floats(1e-8, 1e-6))
def test_a_linear_law_is_found(fixed: float, per_token: float, per_context: float) -> None:
    draw, fit = random.Random(1), StepFit()
    for _ in range(60):
        tokens, context = draw.uniform(1, 100), draw.uniform(1_000, 100_000)
        fit = fit.observe([steps(tokens, context, fixed + per_token * tokens + per_context * context)])
    times = fit.times()
    assert times is not None
    truth = fixed + per_token * 50 + per_context * 50_000
    assert times.seconds(50, 50_000) == pytest.approx(truth, rel=0.15)


def test_little_is_not_enough() -> None:
    fit = StepFit().observe([steps(8, 100, 0.1)] * 4)
    assert fit.times() is None
    assert fit.observe([steps(8, 100, 0.1)]).times() is not None


def test_slow_first_steps_do_not_spoil_a_fit() -> None:
    fit = StepFit()
    for n in range(40):
        fit = fit.observe([steps(10 + n % 5, 1_000, 5.0 if n % 4 == 0 else 0.02)])
    fit = fit.observe([steps(40, 4_000, 8.0)])  # a load of which only one slow step was seen
    times = fit.times()
    assert times is not None
    assert times.seconds(12, 1_000) == pytest.approx(0.02, rel=0.3)


def test_loads_far_above_the_measured_ones_are_not_believed() -> None:
    fit = StepFit().observe([steps(16, 0, 0.02)] * 10)
    times = fit.times()
    assert times is not None
    assert times.observed_tokens == 16
    assert times.most_tokens == 24
