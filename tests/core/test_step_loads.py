"""Times of steps are kept by load, for a bounded number of loads."""

from __future__ import annotations

from paceline.core.step_loads import MOST_LOADS, StepLoads


def test_steps_with_about_the_same_load_are_counted_together() -> None:
    loads = StepLoads()
    loads.count(8, 1000, 0.02)
    loads.count(15, 1900, 0.04)
    loads.count(16, 1000, 0.05)
    loads.count(0, 0, 1.0)  # a step that computed nothing
    first, second = loads.all()
    assert (first.tokens, first.context, first.seconds.count) == (23, 2900, 2)
    assert (second.tokens, second.seconds.count) == (16, 1)
    assert first.number != second.number


def test_the_load_that_was_seen_longest_ago_makes_room() -> None:
    loads = StepLoads()
    for power in range(MOST_LOADS):
        loads.count(1, 4**power, 0.01)
    oldest, second, *_ = loads.all()
    loads.count(1, 1, 0.01)
    loads.count(2, 1, 0.01)
    kept = [load.number for load in loads.all()]
    assert len(kept) == MOST_LOADS
    assert oldest.number in kept
    assert second.number not in kept
