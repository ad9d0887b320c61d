"""A lock for which owners take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.services.worker.encoder import AbandonedError, FairTurns


async def serve(owners: Sequence[str], leaving: frozenset[int] = frozenset()) -> list[tuple[str, int]]:
    """Let owners wait for turns, in this order, while another one has the turn. Return the order of their turns.

    Args:
        leaving: numbers of those that are cancelled before the turn is free.
    """
    turns, served = FairTurns(), []

    async def wait(owner: str, number: int) -> None:
        async with turns.turn(owner, asyncio.Event()):
            served.append((owner, number))
            await asyncio.sleep(0)

    async with turns.turn("other", asyncio.Event()):
        tasks = [asyncio.create_task(wait(owner, number)) for number, owner in enumerate(owners)]
        await asyncio.sleep(0)
        for number in leaving:
            tasks[number].cancel()
        await asyncio.sleep(0)
        assert turns.waiting == len(owners) - len(leaving)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert turns.waiting == 0
    async with asyncio.timeout(1), turns.turn("last", asyncio.Event()):
        pass
    return served


async def test_an_owner_with_many_turns_does_not_hold_up_one_with_a_single_turn() -> None:
    assert await serve(["a", "a", "a", "b", "a", "c"]) == [("a", 0), ("b", 3), ("c", 5), ("a", 1), ("a", 2), ("a", 4)]


async def test_a_turn_that_comes_with_a_cancellation_goes_to_the_next_one() -> None:
    turns, served = FairTurns(), []

    async def wait(owner: str) -> None:
        async with turns.turn(owner, asyncio.Event()):
            served.append(owner)

    async with turns.turn("other", asyncio.Event()):
        first, second = asyncio.create_task(wait("a")), asyncio.create_task(wait("b"))
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert served == ["b"]


async def test_a_waiter_that_is_cancelled_just_before_the_turn_is_free_holds_up_nobody() -> None:
    turns, served = FairTurns(), []

    async def wait(owner: str) -> None:
        async with turns.turn(owner, asyncio.Event()):
            served.append(owner)

    async with turns.turn("other", asyncio.Event()):
        first, second = asyncio.create_task(wait("a")), asyncio.create_task(wait("b"))
        await asyncio.sleep(0)
        first.cancel()
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError, type(None)]
    assert (served, turns.waiting) == (["b"], 0)
    async with turns.turn("c", asyncio.Event()):
        pass


async def test_an_abandoned_wait_ends_before_its_turn_comes() -> None:
    turns, abandoned = FairTurns(), asyncio.Event()

    async def wait() -> None:
        async with turns.turn("a", abandoned):
            pass

    async with turns.turn("other", asyncio.Event()):
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert turns.waiting == 1
        abandoned.set()
        with pytest.raises(AbandonedError):
            await waiting
        assert turns.waiting == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=12), st.sets(st.integers(0, 11)))
def test_all_that_stay_are_served_and_each_owner_in_its_order(owners: list[str], leaving: set[int]) -> None:
    gone = frozenset(number for number in leaving if number < len(owners))
    served = asyncio.run(serve(owners, gone))
    assert sorted(served) == sorted((owner, number) for number, owner in enumerate(owners) if number not in gone)
    for owner in "abc":
        numbers = [number for own, number in served if own == owner]
        assert numbers == sorted(numbers)
