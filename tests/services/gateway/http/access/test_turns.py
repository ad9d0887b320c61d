"""Turns of owners at a few places: who waits, and who comes next."""

from __future__ import annotations

import asyncio
import contextlib

from paceline.services.gateway.http.access.turns import OwnerTurns


class Crowd:
    """Requests that take a place each, and give it back when they are told to."""

    def __init__(self, turns: OwnerTurns) -> None:
        self._turns = turns
        self.inside: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    async def come(self, *names: str) -> None:
        """Let requests come. The first letter of a name is its owner, "-" for none."""
        for name in names:
            self._leave[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._stay(name))
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await self._tasks[name]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._tasks[name]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _stay(self, name: str) -> None:
        owner = name[0].strip("-")
        await self._turns.take(owner)
        try:
            self.inside.append(name)
            await self._leave[name].wait()
            self.inside.remove(name)
        finally:
            self._turns.give_back(owner)


async def test_owners_take_turns_and_none_has_all_places() -> None:
    crowd = Crowd(OwnerTurns(3))
    await crowd.come("a1", "a2", "a3", "a4")
    assert crowd.inside == ["a1", "a2"]
    await crowd.come("b1", "b2", "c1")
    assert crowd.inside == ["a1", "a2", "b1"]
    await crowd.leave("a1")
    assert crowd.inside == ["a2", "b1", "a3"]  # "a" has waited longest
    await crowd.leave("a2")
    assert crowd.inside == ["b1", "a3", "b2"]
    await crowd.leave("a3")
    assert crowd.inside == ["b1", "b2", "c1"]
    for name in ("b1", "b2", "c1", "a4"):
        await crowd.leave(name)
    assert crowd.inside == []


async def test_a_single_place_goes_round() -> None:
    crowd = Crowd(OwnerTurns(1))
    await crowd.come("a1", "a2", "b1")
    order = [*crowd.inside]
    for _ in range(2):
        await crowd.leave(order[-1])
        order += crowd.inside
    assert order == ["a1", "a2", "b1"] or order == ["a1", "b1", "a2"]
    await crowd.leave(order[-1])


async def test_a_request_that_is_cancelled_gives_its_place_back() -> None:
    crowd = Crowd(OwnerTurns(1))
    await crowd.come("a1", "b1", "c1")
    await crowd.cancel("b1")
    await crowd.cancel("a1")
    assert crowd.inside[-1:] == ["c1"]
    await crowd.leave("c1")


async def test_callers_without_a_key_have_all_places() -> None:
    crowd = Crowd(turns := OwnerTurns(2))
    await crowd.come("-1", "-2", "-3")
    assert crowd.inside == ["-1", "-2"]
    assert turns.waiting("") == 1
    await crowd.leave("-1")
    assert (crowd.inside, turns.waiting("")) == (["-2", "-3"], 0)
    for name in ("-2", "-3"):
        await crowd.leave(name)
    assert (turns._taken, turns._waiting) == ({}, {})
