"""What workers that take turns do to each other."""

from __future__ import annotations

import pytest

from paceline.core.step_record import StepRecord
from paceline.core.step_times import Curve, StepTimes, TurnTimes
from paceline.profiler.turns import MeasuredArrivals, find_arrival, find_turns

TIMES = StepTimes(prefill=Curve(points=((100, 0.1),)), decode=Curve(points=((1, 0.01),)))


def prompt(begin: float, seconds: float) -> StepRecord:
    return StepRecord(0, begin + seconds, seconds, 100, 0, 0, 0, 0)


def decoding(begin: float, seconds: float, number: int) -> StepRecord:
    return StepRecord(number, begin + seconds, seconds, 0, 0, 1, 0, 0)


def test_prefill_has_another_speed_in_its_turns() -> None:
    # A prompt takes 0.1 s alone. Here it takes 0.13 s, of which decode has 0.048 s.
    prompts = [prompt(1.0 * number, 0.13) for number in range(3)]
    steps = [decoding(1.0 * number + 0.01 + 0.03 * step, 0.012, 0) for number in range(3) for step in range(4)]
    found = find_turns(0.0, [*prompts, prompt(7.0, 0.1)], [*steps, decoding(5.0, 0.01, 0)], TIMES, TIMES)
    assert found.speed_of_prefill(1) == pytest.approx(0.1 / 0.082)
    assert found.speed_of_prefill(0) == 1
    assert (found.itl_target, found.least_share, found.backlog_share) == (0.028, 1.5, 3.0)
    few = find_turns(0.0, prompts[:2], steps, TIMES, TIMES)
    assert few.speed_of_prefill(1) == 1


def test_decode_steps_take_longer_and_begin_late_while_prefill_has_work() -> None:
    # After a step of 12 ms, decode leaves 18 ms to prefill, as its share is 1.5, and begins again after 20 ms.
    steps = [decoding(0.032 * number, 0.012, number) for number in range(12)]
    found = find_turns(0.0, [prompt(0.0, 0.4)], [*steps, decoding(5.0, 0.01, 13)], TIMES, TIMES)
    assert found.decode is not None
    assert found.decode.at(1) == pytest.approx(0.012)
    assert found.decode_spread.at(1.0) == pytest.approx(1.0)
    assert found.late.at(0, 0.5) == pytest.approx(0.002)


def test_without_steps_at_the_same_time_nothing_is_known() -> None:
    found = find_turns(0.05, [prompt(0.0, 0.1)], [decoding(3.0, 0.01, 0)], TIMES, TIMES)
    assert (found.speed_of_prefill(1), found.decode, found.itl_target) == (1.0, None, 0.05)
    assert (found.least_share, found.backlog_share) == (0.5, 0.5)
    assert found.late.seconds == 0


def test_an_arrival_costs_what_prompts_at_the_same_time_take_longer() -> None:
    rows = [prompt(0.13 * number, 0.12) for number in range(4)]
    # They take 0.51 s instead of 0.4 s, and three came meanwhile.
    assert find_arrival([MeasuredArrivals(4, rows)], TIMES, TurnTimes()) == pytest.approx(0.11 / 3)
    # Decode had 0.03 s, and the first two prompts were slower beside it.
    turns = TurnTimes(prefill_speed=Curve(points=((1, 0.8),)))
    decoded = [decoding(0.10, 0.020, 0), decoding(0.14, 0.010, 1)]
    assert find_arrival([MeasuredArrivals(4, rows, decoded)], TIMES, turns) == pytest.approx((0.51 - 0.03 - 0.45) / 3)
    assert find_arrival([MeasuredArrivals(1, rows[:1]), MeasuredArrivals(4, [])], TIMES, TurnTimes()) == 0
