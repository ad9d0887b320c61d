"""Statistics of how soon blocks are requested again."""

from __future__ import annotations

import pytest

from paceline.core.cache_policy.hazard import BINS, EDGES, HORIZON, Hazards, bin_of


def test_bins_cover_all_ages() -> None:
    assert [bin_of(age) for age in EDGES] == list(range(BINS))
    assert bin_of(HORIZON - 1) == bin_of(10 * HORIZON) == BINS - 1


def run(hazards: Hazards, epochs: int, *loads: tuple[int, int | None]) -> None:
    """Run epochs. Each load is a class and a delay: in each epoch ten blocks of this class are used.

    They are requested again after the delay, in epochs, or never if it is None.
    """
    for _ in range(epochs):
        for kind, delay in loads:
            for _ in range(10):
                if delay is not None and hazards.now >= delay:
                    hazards.ask(kind, hazards.now - delay)
                hazards.add(kind, hazards.now)
        hazards.tick()


def test_nothing_is_worth_anything_before_it_was_asked_for() -> None:
    hazards = Hazards([None] * 2)
    run(hazards, 10, (0, None), (1, None))
    assert hazards.worth() == [[0.0] * BINS] * 2


def test_what_is_asked_for_sooner_is_worth_more() -> None:
    hazards = Hazards([None] * 3)
    run(hazards, 100, (0, 3), (1, 20), (2, None))
    soon, late, never = (row[0] for row in hazards.worth())
    assert soon > 2 * late > 4 * never


def test_a_block_is_worth_the_more_the_nearer_its_time_comes_and_little_behind_it() -> None:
    hazards = Hazards([None] * 1)
    run(hazards, 200, (0, 16))
    worth = hazards.worth()[0]
    before, there, behind = bin_of(4), bin_of(16), bin_of(64)
    assert worth[0] < worth[before] < worth[there]
    assert worth[behind] < worth[0]


def test_those_that_still_wait_count() -> None:
    # If blocks that still wait did not count, the few that were requested again would look like all blocks.
    hazards = Hazards([None] * 1)
    for _ in range(90):
        hazards.add(0, hazards.now)
    run(hazards, 20, (0, 2))
    few = hazards.worth()[0][bin_of(2)]
    alone = Hazards([None] * 1)
    run(alone, 20, (0, 2))
    assert few < alone.worth()[0][bin_of(2)]


def test_what_changed_is_learned_anew() -> None:
    hazards = Hazards([None] * 2)
    run(hazards, 300, (0, 3), (1, 40))
    run(hazards, 200, (0, 40), (1, 3))
    first, second = (row[0] for row in hazards.worth())
    assert second > first


def test_blocks_beyond_the_horizon_are_not_waited_for() -> None:
    hazards = Hazards([None] * 1)
    hazards.add(0, hazards.now)
    for _ in range(2 * HORIZON):
        hazards.tick()
    hazards.ask(0, 0)
    assert hazards.worth() == [[0.0] * BINS]
    assert not any(hazards._population[0])


def test_a_class_is_worth_its_assumed_rate_until_it_is_observed() -> None:
    hazards = Hazards([None, 0.25])
    assert [row[0] for row in hazards.worth()] == [0.0, pytest.approx(0.25)]
    run(hazards, 100, (0, 3), (1, None))
    known, assumed = (row[0] for row in hazards.worth())
    assert assumed < known


@pytest.mark.parametrize("epochs", [1, 7, HORIZON + 5])
def test_the_population_is_that_of_the_waiting(epochs: int) -> None:
    hazards = Hazards([None] * 1)
    run(hazards, epochs, (0, 3))
    assert sum(hazards._population[0]) == sum(hazards._waiting[0])
    by_age = [0] * BINS
    for age in range(1, min(epochs, HORIZON - 1) + 1):
        by_age[bin_of(age)] += hazards._waiting[0][(hazards.now - age) % HORIZON]
    assert hazards._population[0] == by_age
