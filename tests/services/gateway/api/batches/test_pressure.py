"""How many lines run at the same time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.proto.fleet_pb2 import LoadReport
from paceline.services.common.registry import Member, Role, State
from paceline.services.gateway.api.batches.pressure import BUSY_SECONDS, LineGate, LinePlaces, RefusedLines, places_of
from paceline.services.gateway.routing.candidates import Candidate

LONG = 1000.0


class World:
    """A gate, and what it sees."""

    def __init__(self) -> None:
        self.has_workers = True
        self.places = LinePlaces(100, 100)
        self.waiting = self.clients = 0
        self.now = 0.0
        self.gate = LineGate(
            lambda: self.has_workers,
            lambda: self.places,
            lambda: self.waiting,
            lambda: self.clients,
            lambda: self.now,
        )
        self.begun = 0
        self.go_on = asyncio.Event()

    def begin(self) -> None:
        self.begun += 1

    def add(self, first: bool = False) -> asyncio.Task[str | None]:
        async def work() -> str:
            await self.go_on.wait()
            return "done"

        return asyncio.create_task(self.gate.run(work, first=first, on_enter=self.begin))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_lines_fill_free_places_and_no_more() -> None:
    world = World()
    world.places = LinePlaces(6, 3)
    lines = [world.add() for _ in range(10)]
    await settle()
    assert world.begun <= 6
    world.go_on.set()
    assert await asyncio.gather(*lines) == ["done"] * 10
    assert len(world.gate) == 0


async def test_the_newest_lines_stop_if_clients_wait() -> None:
    world = World()
    lines = [world.add() for _ in range(5)]
    await settle()
    world.waiting = 2
    world.gate.open()
    world.gate.open()
    assert await asyncio.gather(*lines[3:]) == [None, None]
    assert not any(line.done() for line in lines[:3])
    again = world.add(first=True)
    await settle()
    assert world.begun == 5
    world.waiting = 0
    world.go_on.set()
    world.gate.open()
    assert await again == "done"
    await asyncio.gather(*lines)


async def test_lines_begin_slowly_beside_clients() -> None:
    world = World()
    world.clients = 1
    lines = [world.add() for _ in range(3)]
    await settle()
    assert world.begun == 1
    world.now += BUSY_SECONDS
    world.gate.open()
    await settle()
    assert world.begun == 2
    for each in lines:
        each.cancel()
    await asyncio.gather(*lines, return_exceptions=True)
    assert len(world.gate) == 0


async def test_busy_workers_get_fewer_lines() -> None:
    world = World()
    lines = [world.add() for _ in range(20)]
    await settle()
    assert world.begun == 8
    world.gate.note_busy()
    for each in lines[:4]:
        each.cancel()
    await settle()
    assert world.begun == 8
    world.go_on.set()
    assert (await asyncio.gather(*lines, return_exceptions=True))[4:] == ["done"] * 16


def candidate(role: Role, places: int, running: int, is_ready: bool) -> Candidate:
    state: State = "ready" if is_ready else "starting"
    load = LoadReport(running=running)
    return Candidate(Member(f"{role}-{running}", role, 1, "", "host", state, max_seqs=places, load=load))


roles: st.SearchStrategy[Role] = st.sampled_from(["decode", "prefill"])
members = st.builds(candidate, roles, st.integers(1, 64), st.integers(0, 70), st.booleans())


@given(st.lists(members, max_size=5))
def test_a_part_of_the_places_stays_free_for_clients(fleet: list[Candidate]) -> None:
    places = places_of(fleet)
    decode = [each for each in fleet if each.member.role == "decode" and each.member.state == "ready"]
    assert 0 <= places.free <= places.most
    in_all = sum(each.member.max_seqs for each in decode)
    assert places.most <= (0.75 * in_all if in_all > 1 else in_all)


def test_workers_with_one_place_take_lines() -> None:
    assert places_of([candidate("decode", 1, 0, True), candidate("prefill", 1, 0, True)]) == LinePlaces(1, 1)


async def test_the_gate_is_shut_while_its_only_line_waits_for_a_worker() -> None:
    world = World()
    world.has_workers, world.places = False, LinePlaces(1, 1)
    seen = [world.gate.is_shut]
    line = world.add()
    await settle()
    seen.append(world.gate.is_shut)
    world.has_workers = True
    assert [*seen, world.gate.is_shut] == [False, True, False]
    world.go_on.set()
    assert await line == "done"


@pytest.mark.parametrize("first", [True, False])
async def test_a_line_that_is_given_up_leaves_no_place_taken(first: bool) -> None:
    world = World()
    world.places = LinePlaces(0, 0)
    line = world.add(first)
    await settle()
    line.cancel()
    await asyncio.gather(line, return_exceptions=True)
    world.places = LinePlaces(1, 1)
    world.go_on.set()
    assert await world.add() == "done"
    assert len(world.gate) == 0


async def test_the_gate_may_open_while_a_line_is_given_up() -> None:
    world = World()
    world.places = LinePlaces(0, 0)
    given_up, other = world.add(), world.add()
    await settle()
    given_up.cancel()
    world.places = LinePlaces(1, 1)
    world.gate.open()  # before the line has noticed its end
    world.go_on.set()
    assert await other == "done"
    assert len(world.gate) == 0


async def test_a_line_is_tried_again_after_its_time() -> None:
    refused = RefusedLines()
    await refused.wait(1, 0.01)
    refused.note_end(1)
    await refused.wait_for_none()


async def test_each_line_that_ends_lets_one_try_again() -> None:
    refused = RefusedLines()
    lines = [asyncio.create_task(refused.wait(number, LONG)) for number in (1, 2, 3)]
    await asyncio.sleep(0)
    lines[0].cancel()
    refused.note_end(9)
    await lines[1]
    assert not lines[2].done()
    refused.note_end(1)
    await lines[2]


async def test_no_line_is_read_until_the_last_one_that_was_refused_has_ended() -> None:
    refused = RefusedLines()
    line = asyncio.create_task(refused.wait(1, LONG))
    await asyncio.sleep(0)
    reader = asyncio.create_task(refused.wait_for_none())
    refused.note_end(2)
    await line
    assert not reader.done()
    refused.note_end(1)
    await reader
