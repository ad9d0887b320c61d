"""What workers that take turns do to each other."""

from __future__ import annotations

import pytest

from paceline.core.step_record import StepRecord
from paceline.core.step_times import Curve, StepTimes
from paceline.profiler.turns import find_turns

TIMES = StepTimes(prefill=Curve(points=((100, 0.1),)), decode=Curve(points=((1, 0.01),)))


def prompt(begin: float, seconds: float) -> StepRecord:
    return StepRecord(0, begin + seconds, seconds, 100, 0, 0, 0, 0)


def decoding(begin: float, seconds: float) -> StepRecord:
    return StepRecord(0, begin + seconds, seconds, 0, 0, 1, 0, 0)


def test_overlap_and_slowdown_are_those_of_the_steps() -> None:
    # A prompt takes 0.1 s alone. Here it takes 0.13 s, of which decode has 0.048 s. So 0.018 s were computed meanwhile.
    steps = [decoding(0.01 + 0.03 * number, 0.012) for number in range(4)]
    found = find_turns(0.0, [prompt(0.0, 0.13)], [*steps, decoding(5.0, 0.01)], TIMES, TIMES)
    assert found.overlap == pytest.approx(0.018 / 0.048)
    assert found.slowdown == pytest.approx(1.2)
    assert (found.itl_target, found.least_share) == (0.028, 1.5)


def test_without_steps_at_the_same_time_nothing_is_known() -> None:
    found = find_turns(0.05, [prompt(0.0, 0.1)], [decoding(3.0, 0.01)], TIMES, TIMES)
    assert (found.overlap, found.slowdown, found.itl_target, found.least_share) == (0.0, 1.0, 0.05, 0.5)
