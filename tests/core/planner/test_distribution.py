"""Percentiles of a histogram."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.planner.distribution import Distribution

values = st.lists(st.floats(1e-5, 1e9), min_size=1, max_size=50)


@given(values, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_percentile_is_near_the_nearest_rank(values: list[float], share: float) -> None:
    exact = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    assert Distribution.of(values).percentile(share) == pytest.approx(exact, rel=0.05)


@given(values, values)
def test_merging_counts_the_values_of_both(first: list[float], second: list[float]) -> None:
    merged = Distribution.of(first)
    merged.merge(Distribution.of(second))
    both = Distribution.of(first + second)
    assert merged.counts == both.counts
    assert merged.mean == pytest.approx(math.fsum(first + second) / len(first + second))


def test_old_values_are_forgotten() -> None:
    distribution = Distribution.of([1.0])
    for _ in range(20):
        distribution = distribution.faded(0.5)
    distribution.add(8.0)
    assert distribution.percentile(0.5) == pytest.approx(8.0, rel=0.05)
    assert distribution.count == pytest.approx(1.0, rel=1e-3)


def test_shares_and_zeros() -> None:
    distribution = Distribution.of([0.0, 1.0, 2.0, 10.0])
    assert distribution.share_within(2.0) == 0.75
    assert distribution.percentile(0.25) == 0.0
    assert Distribution().share_within(1.0) == 1.0
    assert Distribution().percentile(0.5) == Distribution().mean == 0.0
