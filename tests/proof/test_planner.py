"""The planner in small worlds and in large ones. `make proof` tries more."""

from __future__ import annotations

import dataclasses

import pytest

from tests.proof.planner_explore import SETUPS, Explorer
from tests.proof.planner_mutations import MUTATIONS
from tests.proof.planner_simulate import FEW_SEEDS, simulate
from tests.proof.world import Violation

FAILING_SEEDS = {
    "without_a_look_for_stuck_workers": 136,
    "without_room_for_requests": 25,
}
"""Seeds that are tried first with a mutation, because few others find it."""
FAILING_SETUPS = {"without_a_wake": "asleep", "without_draining_devices": "no_flips"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_nothing_that_may_happen_breaks_a_promise(name: str) -> None:
    explorer = Explorer(dataclasses.replace(SETUPS[name], ticks=1))
    explorer.run()
    assert explorer.runs > 10


@pytest.mark.slow
def test_no_seed_breaks_a_promise() -> None:
    for seed in range(FEW_SEEDS // 3):
        simulate(seed)


def test_a_seed_replays() -> None:
    assert simulate(7) == simulate(7)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planner_without_a_guard_breaks_a_promise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    with pytest.raises(Violation):
        _try_all(name)


def _try_all(mutation: str) -> None:
    if mutation in FAILING_SETUPS:
        Explorer(dataclasses.replace(SETUPS[FAILING_SETUPS[mutation]], ticks=1)).run()
        return
    for seed in (FAILING_SEEDS.get(mutation, 0), *range(FEW_SEEDS)):
        simulate(seed)
