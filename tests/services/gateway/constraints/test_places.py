"""Places for trials: who waits, who comes next, and who is refused."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from paceline.core.errors import BusyError
from paceline.services.gateway.constraints.places import MAX_WAITING, Places


class Crowd:
    """Requests that take a place each, and give it back when they are told to."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.inside: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    async def come(self, *names: str) -> None:
        """Let requests come. The first letter of a name is its owner."""
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
        async with self._places.place(name[0]):
            self.inside.append(name)
            await self._leave[name].wait()
            self.inside.remove(name)


async def test_owners_take_turns_and_none_has_all_places() -> None:
    crowd = Crowd(Places(3, seconds=60))
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
    crowd = Crowd(Places(1, seconds=60))
    await crowd.come("a1", "a2", "b1")
    order = [*crowd.inside]
    for _ in range(2):
        await crowd.leave(order[-1])
        order += crowd.inside
    assert order == ["a1", "a2", "b1"] or order == ["a1", "b1", "a2"]
    await crowd.leave(order[-1])


async def test_a_request_that_is_cancelled_gives_its_place_back() -> None:
    crowd = Crowd(Places(1, seconds=60))
    await crowd.come("a1", "b1", "c1")
    await crowd.cancel("b1")
    await crowd.cancel("a1")
    assert crowd.inside[-1:] == ["c1"]
    await crowd.leave("c1")


async def test_a_wait_has_an_end() -> None:
    places = Places(1, seconds=0.01)
    async with places.place("a"):
        with pytest.raises(BusyError, match="other constraints are being compiled"):
            async with places.place("b"):
                raise AssertionError
    async with places.place("b"):
        pass


async def test_an_owner_has_a_bounded_number_of_waiting_requests() -> None:
    crowd = Crowd(Places(1, seconds=60))
    await crowd.come(*(f"a{number}" for number in range(MAX_WAITING + 1)))
    with pytest.raises(BusyError, match="too many new constraints of this key"):
        async with crowd._places.place("a"):
            raise AssertionError
    await crowd.come("b1")
    await crowd.leave("a0")
    for number in range(1, MAX_WAITING + 1):
        await crowd.cancel(f"a{number}")
    await crowd.leave("b1")
