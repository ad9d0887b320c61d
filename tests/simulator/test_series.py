"""Sums in constant time against sums one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.step_times import Drafts, Spread
from paceline.simulator.series import SIZE, Ratios, Yields
from tests.simulator.tiny import UNEVEN

RATIOS = Ratios(UNEVEN, 1)
YIELDS = Yields(Drafts(most=2, accepted=(0.7, 0.5)), 1)


@given(st.integers(0, 3 * SIZE), st.integers(0, 2 * SIZE), st.sampled_from([0.0, 0.25]))
def test_the_time_of_many_steps_is_the_sum_of_their_times(index: int, steps: int, growth: float) -> None:
    one_by_one = sum((1 + i * growth) * RATIOS.at(index + i) for i in range(steps))
    assert RATIOS.seconds(index, steps, 1.0, growth) == pytest.approx(one_by_one)
    assert sum(RATIOS.values(index, steps)) == pytest.approx(sum(RATIOS.at(index + i) for i in range(steps)))


@given(st.integers(0, 3 * SIZE), st.integers(1, 200), st.floats(0, 300))
def test_the_step_at_an_instant_is_the_first_that_ends_after_it(index: int, most: int, seconds: float) -> None:
    steps = RATIOS.steps_within(seconds, index, most, 1.0, 0.1)
    assert steps == most or RATIOS.seconds(index, steps, 1.0, 0.1) >= seconds
    assert steps == 0 or RATIOS.seconds(index, steps - 1, 1.0, 0.1) < seconds


def test_a_series_has_the_distribution_of_its_spread() -> None:
    ratios = sorted(RATIOS.values(0, SIZE))
    assert ratios[SIZE // 2] == 1.0
    assert ratios[-1] == pytest.approx(3.0, abs=0.01)
    assert set(Ratios(Spread(), 1).values(0, SIZE)) == {1.0}


@given(st.integers(0, 3 * SIZE), st.integers(1, 3 * SIZE))
def test_steps_are_the_fewest_that_give_so_many_tokens(index: int, tokens: int) -> None:
    steps = YIELDS.steps(index, tokens)
    assert YIELDS.tokens(index, steps) >= tokens > YIELDS.tokens(index, steps - 1)


def test_drafts_give_the_tokens_that_their_acceptance_promises() -> None:
    assert YIELDS.mean == pytest.approx(1 + 0.7 + 0.7 * 0.5, abs=0.001)
    assert Yields(Drafts(), 1).steps(5, 17) == 17
