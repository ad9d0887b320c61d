from __future__ import annotations

import pytest

from paceline.services.gateway.queueing.forecast import AdmissionRate, FirstTokens, UsualAnswers


def test_a_rate_is_that_of_the_time_in_which_somebody_waited() -> None:
    rate, now = AdmissionRate(), 0.0
    for _ in range(50):
        rate.set_waiting(True, now)
        now += 0.5
        rate.admit(100.0, now)
        rate.set_waiting(False, now)
        now += 3.0
    assert rate.per_second(now) == pytest.approx(200, rel=0.05)


def test_a_rate_follows_the_fleet_within_its_half_life() -> None:
    rate, now = AdmissionRate(), 0.0
    rate.set_waiting(True, now)
    assert rate.per_second(now) is None
    for work in (100.0, 1000.0):
        for _ in range(60):
            now += 0.5
            rate.admit(work, now)
    assert 1700 < (rate.per_second(now) or 0) < 2050
    assert (rate.per_second(now + 100) or 0) < 10  # nobody is admitted any more


def test_the_time_to_the_first_token_is_a_percentile_of_the_newest_ones() -> None:
    first = FirstTokens()
    assert first.seconds(0.5, 0.99, 0.0) == 0.5
    for number in range(100):
        first.note(1.0 + number / 100, 1.0, 1.0)
    assert first.seconds(0.5, 0.5, 1.0) == pytest.approx(0.99)
    assert first.seconds(0.5, 0.99, 1.0) == pytest.approx(1.48)
    assert first.seconds(0.5, 0.99, 100.0) == 0.5


def test_a_long_prompt_is_compared_with_long_ones() -> None:
    first = FirstTokens()
    for _ in range(100):
        first.note(0.1 + 0.05, 0.1, 1.0)
    assert first.seconds(2.0, 0.99, 1.0) == pytest.approx(2.05)  # no long one was seen yet
    for _ in range(8):
        first.note(2.0 + 1.5, 2.0, 1.0)
    assert first.seconds(2.5, 0.5, 1.0) == pytest.approx(2.5 + 1.5)
    assert first.seconds(0.1, 0.99, 1.0) == pytest.approx(0.15)


def test_answers_are_as_long_as_the_latest_of_their_owner() -> None:
    answers = UsualAnswers()
    assert answers.tokens("a", 10_000) == 256
    for _ in range(100):
        answers.note("a", 20)
    assert answers.tokens("a", 10_000) == pytest.approx(20)
    assert answers.tokens("a", 5) == 5
