"""A limit per minute holds in every minute, is used to the full, and tells truly when more may be used."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.http.access.limits import MINUTE, Charge, MinuteLimit, Part

EARLY = 1e-6
"""Rounding of floating-point numbers, in seconds."""

limits = st.integers(1, 5000)
gaps = st.floats(0, 30, allow_nan=False)


def most_in_a_minute(used: list[tuple[float, int]]) -> int:
    """Return the largest sum of amounts in 60 seconds."""
    sums = []
    for start, _ in used:
        sums.append(sum(amount for at, amount in used if start <= at < start + MINUTE))
    return max(sums, default=0)


@given(limits, st.lists(st.tuples(gaps, st.integers(1, 100)), max_size=60))
def test_no_minute_has_more_than_the_limit(per_minute: int, tries: list[tuple[float, int]]) -> None:
    limit, now, used = MinuteLimit(per_minute, 0.0), 0.0, []
    for gap, amount in tries:
        now += gap
        amount = min(amount, per_minute)
        if not limit.wait(amount, now):
            limit.take(amount, now)
            used.append((now, amount))
    assert most_in_a_minute(used) <= per_minute


@given(limits, st.lists(st.tuples(gaps, st.integers(1, 6000)), max_size=40))
def test_after_the_wait_there_is_room(per_minute: int, tries: list[tuple[float, int]]) -> None:
    limit, now = MinuteLimit(per_minute, 0.0), 0.0
    for gap, amount in tries:
        now += gap
        now += limit.wait(amount, now)
        assert limit.wait(amount, now + EARLY) <= EARLY
        limit.take(amount, now + EARLY)


@pytest.mark.parametrize(("per_minute", "amount"), [(1, 1), (5, 1), (60, 1), (600, 1), (6000, 1), (20_000, 150)])
@pytest.mark.parametrize("rate", [1.5, 10])
def test_overload_uses_every_minute_to_the_full(per_minute: int, amount: int, rate: float) -> None:
    limit, used = MinuteLimit(per_minute, 0.0), []
    for tick in range(int(per_minute / amount * rate * 4)):
        now = tick * MINUTE * amount / (per_minute * rate)
        if not limit.wait(amount, now):
            limit.take(amount, now)
            used.append((now, amount))
    for minute in range(4):
        total = sum(spent for at, spent in used if minute * MINUTE <= at < (minute + 1) * MINUTE)
        assert per_minute - max(amount, per_minute * 0.02) <= total <= per_minute


def test_a_small_limit_may_be_used_at_once() -> None:
    limit = MinuteLimit(5, 0.0)
    for _ in range(5):
        assert limit.wait(1, 1.0) == 0
        limit.take(1, 1.0)
    assert limit.wait(1, 1.0) == pytest.approx(MINUTE)


def test_a_large_limit_is_paced() -> None:
    limit = MinuteLimit(600, 0.0)
    at_once = next(count for count in itertools.count() if limit.wait(1, 1.0) or not limit.take(1, 1.0))
    assert at_once == 100
    assert limit.wait(1, 1.0) == pytest.approx(0.1)
    assert limit.remaining(1.0) == 500


@given(st.lists(st.tuples(gaps, st.integers(1, 50), st.integers(-50, 50)), min_size=1, max_size=40))
def test_what_is_corrected_counts_as_if_it_had_been_charged_so(uses: list[tuple[float, int, int]]) -> None:
    corrected, exact, now = MinuteLimit(10_000, 0.0), MinuteLimit(10_000, 0.0), 0.0
    for gap, amount, more in uses:
        now += gap
        corrected.correct(corrected.take(amount, now), more, now)
        exact.take(amount + more, now)
    assert corrected.used(now) == exact.used(now)
    assert corrected.wait(9_000, now) == pytest.approx(exact.wait(9_000, now))


def test_tokens_that_come_after_a_minute_count_when_they_come() -> None:
    limit = MinuteLimit(100, 0.0)
    first = limit.take(10, 0.0)
    later = limit.correct(first, 5, 90.0)
    assert (limit.used(90.0), later is first) == (5, False)
    assert limit.correct(first, -5, 91.0) is first, "what is taken back of an old charge was not counted any more"
    assert limit.used(91.0) == 5


def test_used_is_forgotten_after_a_minute() -> None:
    limit = MinuteLimit(100, 0.0)
    limit.take(30, 10.0)
    assert (limit.remaining(20.0), limit.reset(20.0)) == (70, 50.0)
    assert (limit.remaining(70.0), limit.reset(70.0)) == (100, 0.0)


def test_the_log_is_bounded() -> None:
    limit = MinuteLimit(10**9, 0.0)
    charges = {id(limit.take(1, tick / 1000)): None for tick in range(1000)}
    assert len(charges) <= 11


def test_what_others_used_counts() -> None:
    limit = MinuteLimit(100, 0.0)
    assert limit.wait(10, 0.0, Part(0.5, elsewhere=90)) == 0
    limit.take(10, 0.0)
    assert 0 < limit.wait(10, 0.0, Part(0.5, elsewhere=90)) <= MINUTE
    assert limit.remaining(0.0, Part(0.5, elsewhere=90)) == 0


def test_if_nobody_knows_what_others_used_each_has_its_share() -> None:
    limit = MinuteLimit(100, 0.0)
    limit.take(50, 0.0)
    assert limit.wait(1, 30.0, Part(0.5, elsewhere=None)) == pytest.approx(30.0)
    assert limit.wait(1, 40.0) == 0


def test_a_charge_is_an_amount_at_a_time() -> None:
    assert Charge(1.0, 2).counts
