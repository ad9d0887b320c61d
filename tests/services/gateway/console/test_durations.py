"""A histogram whose percentiles are close to those of the durations."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.console.durations import Durations

SECONDS = st.floats(2e-4, 3000)


def histogram(seconds: list[float]) -> Durations:
    durations = Durations()
    for each in seconds:
        durations.add(each)
    return durations


@given(st.lists(SECONDS, min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_within_five_percent_of_the_nearest_rank(seconds: list[float], share: float) -> None:
    exact = sorted(seconds)[math.ceil(share * len(seconds)) - 1]
    (found,) = histogram(seconds).percentiles(share) or [0.0]
    assert found == pytest.approx(exact, rel=0.05)


@given(st.lists(SECONDS, max_size=20), st.lists(SECONDS, max_size=20))
def test_merged_histograms_are_as_one(one: list[float], other: list[float]) -> None:
    merged, whole = Durations.merged([histogram(one), histogram(other)]), histogram(one + other)
    assert merged.count == len(one) + len(other)
    assert merged.percentiles(0.5, 0.9, 0.99) == whole.percentiles(0.5, 0.9, 0.99)


def test_percentiles_of_nothing_are_none() -> None:
    assert Durations().percentiles(0.5) is None


def test_very_short_and_very_long_durations_count_in_the_first_and_last_bucket() -> None:
    shortest, longest = histogram([-1.0, 0.0, 1e6, 1e9]).percentiles(0.5, 1.0) or [0.0, 0.0]
    assert shortest < 1e-3
    assert 3000 < longest < 1e6
