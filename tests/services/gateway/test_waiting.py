from __future__ import annotations

import asyncio

import pytest

from paceline.core.errors import BusyError
from paceline.services.gateway.waiting import WaitingLine


class Room:
    """Places that requests take; none to begin with."""

    def __init__(self) -> None:
        self.places = 0
        self.taken_by: list[str] = []

    def ask(self, name: str):
        async def attempt() -> str | None:
            await asyncio.sleep(0)
            if self.places == 0:
                return None
            self.places -= 1
            self.taken_by.append(name)
            return name

        return attempt


async def queue_up(line: WaitingLine, room: Room, *names: str, first: bool = False) -> list[asyncio.Task[str]]:
    tasks = []
    for name in names:
        length = len(line)
        tasks.append(asyncio.create_task(line.admit(room.ask(name), first=first)))
        while len(line) == length:  # what it waits for gives no signal
            await asyncio.sleep(0)
    return tasks


async def test_with_room_nobody_waits() -> None:
    room = Room()
    room.places = 1
    assert await WaitingLine(0, 60).admit(room.ask("a")) == "a"


async def test_first_come_first_served() -> None:
    line, room = WaitingLine(10, 60), Room()
    tasks = await queue_up(line, room, "a", "b", "c")
    for _ in tasks:
        room.places += 1
        line.wake()
    assert await asyncio.gather(*tasks) == ["a", "b", "c"] == room.taken_by
    assert len(line) == 0


async def test_a_newcomer_does_not_overtake() -> None:
    line, room = WaitingLine(10, 60), Room()
    tasks = await queue_up(line, room, "a")
    room.places = 1
    tasks.append(asyncio.create_task(line.admit(room.ask("b"))))
    await tasks[0]
    assert room.taken_by == ["a"]
    room.places = 1
    await tasks[1]


async def test_the_first_in_line_asks_again_by_itself() -> None:
    line, room = WaitingLine(10, 60), Room()
    tasks = await queue_up(line, room, "a")
    room.places = 1
    assert await tasks[0] == "a"


async def test_who_had_a_place_already_waits_before_all_others() -> None:
    line, room = WaitingLine(1, 60), Room()
    waiting = await queue_up(line, room, "a")
    returning = await queue_up(line, room, "b", first=True)
    room.places = 2
    line.wake()
    await asyncio.gather(*waiting, *returning)
    assert room.taken_by == ["b", "a"]


async def test_the_patient_are_not_refused_and_wait_behind_the_others() -> None:
    line, room = WaitingLine(1, 0.01), Room()
    waiting = asyncio.create_task(line.admit(room.ask("a")))
    await asyncio.sleep(0)
    patient = asyncio.create_task(line.admit(room.ask("b"), patient=True))
    with pytest.raises(BusyError, match=r"within 0\.01 seconds"):
        await waiting
    await asyncio.sleep(0.02)
    room.places = 1
    assert await patient == "b"


async def test_a_full_line_refuses_at_once() -> None:
    line, room = WaitingLine(1, 60), Room()
    tasks = await queue_up(line, room, "a")
    with pytest.raises(BusyError, match="queue is full"):
        await line.admit(room.ask("b"))
    room.places = 1
    await tasks[0]


async def test_waiting_has_an_end() -> None:
    line = WaitingLine(1, 0.01)
    with pytest.raises(BusyError, match=r"within 0\.01 seconds"):
        await line.admit(Room().ask("a"))
    assert len(line) == 0


async def test_who_gives_up_leaves_the_line_to_the_next() -> None:
    line, room = WaitingLine(10, 60), Room()
    first, second = await queue_up(line, room, "a", "b")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    room.places = 1
    assert await second == "b"


async def test_an_error_of_the_attempt_ends_the_waiting() -> None:
    async def attempt() -> str | None:
        raise ValueError("no")

    line = WaitingLine(10, 60)
    with pytest.raises(ValueError, match="no"):
        await line.admit(attempt)
    assert len(line) == 0
