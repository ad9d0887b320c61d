"""The block that each policy evicts first."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.cache_policy.arc import ARC
from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.lru import LRU
from paceline.core.cache_policy.ranking import NOWHERE, Name, Place
from tests.core.cache_policy.policies import name


def use(policy: CachePolicy, text: str, place: Place = NOWHERE) -> bool:
    """Request one block, evicting another one if the cache is full. Return whether the block was cached."""
    found = policy.get(name(text)) is not None
    if found:
        policy.hold(name(text))
        policy.touch([name(text)])
    else:
        if len(policy.blocks()) == policy.slots:
            policy.evict(1)
        policy.insert(name(text), place)
    policy.release(name(text))
    return found


def found(policy: CachePolicy, texts: Iterable[str]) -> int:
    return sum(use(policy, text) for text in texts)


def here(policy: CachePolicy) -> set[Name]:
    return {block.name for block in policy.blocks()}


def test_lru_evicts_what_was_not_used_for_longest() -> None:
    policy = LRU(3)
    found(policy, ["a", "b", "c", "a"])
    assert policy.evict(3) == [name("b"), name("c"), name("a")]


def test_arc_keeps_what_was_used_twice_from_a_scan() -> None:
    policy, plain = ARC(8), LRU(8)
    popular, scan = ["a", "b", "c", "d"] * 2, [f"{number}" for number in range(20)]
    for one in (policy, plain):
        found(one, popular + scan)
    assert {name(text) for text in popular} <= here(policy)
    assert not {name(text) for text in popular} & here(plain)


def test_arc_gives_new_blocks_room_where_it_regrets() -> None:
    policy = ARC(4)
    found(policy, ["a", "b", "c", "d"] * 2)  # each is used twice
    rounds = [[f"u{number}", f"v{number}"] * 2 for number in range(10)]
    assert [found(policy, texts) for texts in rounds][-1] == 2


def test_arc_remembers_no_more_than_it_may() -> None:
    policy = ARC(4)
    found(policy, [str(number % 97) for number in range(1000)])
    assert len(policy._once_gone) + len(policy._often_gone) <= 4
