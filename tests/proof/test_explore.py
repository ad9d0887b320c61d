"""The protocol in every state of small worlds. `make proof` explores more."""

from __future__ import annotations

import dataclasses

import pytest

from tests.proof import moves
from tests.proof.canonical import digest
from tests.proof.explore import Explorer
from tests.proof.setup import SETUPS
from tests.proof.world import make_world

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name", [name for name in SETUPS if name not in ("too_late", "longer_prefix", "evicted_encoding")]
)
def test_every_state_without_faults(name: str) -> None:
    found = Explorer(SETUPS[name]).run()
    assert found.quiet >= 1
    assert found.transitions > found.states


def test_every_state_of_a_request_with_a_fault() -> None:
    Explorer(dataclasses.replace(SETUPS["one"], faults=1)).run()


def test_every_state_of_two_requests_with_a_message_that_comes_twice() -> None:
    Explorer(dataclasses.replace(SETUPS["growth"], faults=1, kind="duplicate")).run()


@pytest.mark.thorough
def test_every_state_of_a_handoff_whose_kvtransfer_is_killed_and_comes_back() -> None:
    Explorer(dataclasses.replace(SETUPS["handoff"], faults=1, attempts=1, kind="crash_ledger")).run()


@pytest.mark.parametrize("kind", ["pass_time", "lose_answer"])
def test_every_state_of_an_encoding_with_a_fault(kind: str) -> None:
    Explorer(dataclasses.replace(SETUPS["encoding"], faults=1, kind=kind)).run()


@pytest.mark.parametrize("kind", ["cut", pytest.param("fetch_failed", marks=pytest.mark.thorough)])
def test_every_state_of_a_transfer_that_breaks(kind: str) -> None:
    Explorer(dataclasses.replace(SETUPS["between_hosts"], faults=1, kind=kind)).run()


@pytest.mark.parametrize("name", ["growth", "between_hosts"])
def test_copies_of_a_world_are_their_own_and_equal_ones_have_one_name(name: str) -> None:
    world = make_world(SETUPS[name])
    names = {digest(world)}
    while going := list(moves.progress(world)):
        before, twin = digest(world), world.copy()
        moves.step(twin, going[0])
        assert digest(world) == before
        moves.step(world, going[0])
        assert digest(world) == digest(twin)
        assert digest(world) not in names
        names.add(digest(world))


def test_the_names_of_requests_and_workers_do_not_matter() -> None:
    one, other = make_world(SETUPS["handoff"]), make_world(SETUPS["handoff"])
    for world, index, decoder, prefiller in ((one, 0, 0, 2), (other, 1, 1, 3)):
        start = next(move for move in moves.progress(world) if move.args == (index, decoder, prefiller))
        moves.step(world, start)
        while going := [move for move in moves.progress(world) if move.act.__name__ != "start"]:
            moves.step(world, going[0])
            if world.asked[index].phase == "decoding":
                break
    assert digest(one) == digest(other)
