"""The inputs of several calls share steps: short calls first, whole inputs, and nobody starves."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.pooling import PoolWish
from paceline.models.pooling.model import TextRow
from paceline.services.pool.pool_calls import PoolCall, PoolPiece, StepPlanner

EMBED = PoolWish("embed")


def call(*lengths: int, wish: PoolWish = EMBED, background: bool = False) -> PoolCall:
    return PoolCall([TextRow([1] * length) for length in lengths], wish, background)


def shape(pieces: Sequence[PoolPiece], *calls: PoolCall) -> list[tuple[int, int, int]]:
    """Return the number of each piece's call, and its inputs [first, end)."""
    return [(calls.index(piece.call), piece.first, piece.end) for piece in pieces]


def drained(planner: StepPlanner, *calls: PoolCall) -> list[list[tuple[int, int, int]]]:
    """Plan steps until nothing is left."""
    steps = []
    while pieces := planner.plan(calls, 0.0, 0.0):
        steps.append(shape(pieces, *calls))
    return steps


def test_inputs_of_many_calls_share_a_step() -> None:
    calls = [call(4), call(3, 3), call(5)]
    (step,) = drained(StepPlanner(32), *calls)
    assert sorted(step) == [(0, 0, 1), (1, 0, 2), (2, 0, 1)]
    assert not any(each.left_len for each in calls)


def test_a_step_has_at_most_its_tokens_and_whole_inputs() -> None:
    own = call(6, 6, 6, 6)
    assert drained(StepPlanner(13), own) == [[(0, 0, 2)], [(0, 2, 4)]]


def test_an_input_that_is_longer_than_a_step_is_computed_alone() -> None:
    long, short = call(40, 2), call(3)
    steps = drained(StepPlanner(16), long, short)
    assert (0, 0, 1) in [piece for step in steps for piece in step]
    assert next(step for step in steps if (0, 0, 1) in step) == [(0, 0, 1)]


def test_a_short_call_goes_before_a_long_one_that_came_first() -> None:
    long, short = call(*[8] * 100), call(4)
    planner = StepPlanner(16)
    planner.plan([long], 0.0, 0.0)
    assert shape(planner.plan([long, short], 0.0, 0.0), long, short)[0] == (1, 0, 1)


def test_a_long_call_is_not_starved_by_short_ones() -> None:
    long, planner = call(*[8] * 20), StepPlanner(16)
    planner.plan([long], 0.0, 0.0)
    for _ in range(100):
        planner.plan([long, call(16)], 0.0, 0.0)
        if not long.left_len:
            break
    assert not long.left_len


def test_the_background_comes_after_all_others() -> None:
    late, urgent = call(4, background=True), call(16, 16)
    assert drained(StepPlanner(16), late, urgent)[-1] == [(0, 0, 1)]


def test_calls_that_wish_other_things_do_not_share_a_step() -> None:
    calls = [call(4), call(4, wish=PoolWish("embed", dimensions=8)), call(4)]
    steps = drained(StepPlanner(64), *calls)
    assert sorted(map(sorted, steps)) == [[(0, 0, 1), (2, 0, 1)], [(1, 0, 1)]]


def test_inputs_of_a_step_that_failed_are_computed_again_alone() -> None:
    calls = [call(4, 4), call(3)]
    planner = StepPlanner(64)
    pieces = planner.plan(calls, 0.0, 0.0)
    assert len(pieces) == 2
    for piece in pieces:
        piece.call.put_back(piece)
    assert sorted(drained(planner, *calls)) == [[(0, 0, 2)], [(1, 0, 1)]]


def test_a_part_that_is_put_back_is_computed_once() -> None:
    own, planner = call(8, 8, 8, 8), StepPlanner(16)
    (first,) = planner.plan([own], 0.0, 0.0)
    (second,) = planner.plan([own], 0.0, 0.0)
    own.put_back(first)
    assert (second.first, second.end) == (2, 4)
    assert drained(planner, own) == [[(0, 0, 2)]]
