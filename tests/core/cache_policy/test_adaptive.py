"""The default policy, which follows the better of two others."""

from __future__ import annotations

import random
from collections.abc import Iterator

from paceline.core.cache_policy.adaptive import Adaptive, Shadow
from paceline.core.cache_policy.arc import ARC
from paceline.core.cache_policy.forecast import Forecast
from paceline.core.cache_policy.lru import LRU
from paceline.core.cache_policy.ranking import Name
from tests.core.cache_policy.policies import name
from tests.core.cache_policy.test_policies import found, here

SLOTS = 128


def use(shadow: Shadow, context: str) -> str:
    """Request the blocks of a context, one per letter. Return the letters of the blocks that were found."""
    names = [name(context[: end + 1]) for end in range(len(context))]
    parents = [None, *names[:-1]]
    return "".join(letter for letter, *pair in zip(context, names, parents) if shadow.use(*pair))


def test_it_finds_what_a_memory_of_its_size_would_find() -> None:
    shadow = Shadow(LRU(3), in_use=lambda _: False)
    assert [use(shadow, context) for context in ("ab", "ab", "x", "ab", "y", "x", "ab")] == [
        "",
        "ab",
        "",
        "ab",
        "",
        "",
        "a",
    ]


def test_children_go_before_their_parents() -> None:
    shadow = Shadow(LRU(3), in_use=lambda _: False)
    for context in ("abc", "x"):
        use(shadow, context)
    assert use(shadow, "abc") == "ab"


def test_blocks_in_use_stay_until_they_are_released() -> None:
    running: set[Name] = {name("a")}
    shadow = Shadow(LRU(2), running.__contains__)
    for context in ("a", "x", "y"):
        use(shadow, context)
    assert use(shadow, "a") == "a"
    for context in ("x", "y"):
        use(shadow, context)
    running.clear()
    shadow.release(name("a"))
    use(shadow, "z")
    assert use(shadow, "a") == ""


def test_it_grows_while_all_blocks_are_in_use() -> None:
    shadow = Shadow(LRU(2), in_use=lambda _: True)
    use(shadow, "abcd")
    assert use(shadow, "abcd") == "abcd"


def rounds(requests: int) -> Iterator[str]:
    """Yield requests for more blocks than the memory holds, one after the other again and again."""
    return (f"round {number % (2 * SLOTS)}" for number in range(requests))


def drifting(requests: int) -> Iterator[str]:
    """Yield requests for popular blocks that are replaced by others every now and then."""
    draw = random.Random(0)
    return (f"{number // 1000} of {int(draw.expovariate(1 / SLOTS))}" for number in range(requests))


def test_it_finds_nearly_as_much_as_the_better_of_both() -> None:
    for load in (rounds, drifting):
        texts = list(load(8000))
        hits, *others = (found(make(SLOTS), texts) for make in (Adaptive, Forecast, ARC))
        assert hits > 0.95 * max(others)


def test_the_better_one_leads_and_knows_all_blocks() -> None:
    policy = Adaptive(SLOTS)
    for load, leader in ((rounds(4000), Forecast), (drifting(4000), ARC), (rounds(4000), Forecast)):
        found(policy, load)
        assert isinstance(policy._leader, leader)
    blocks = here(policy)
    gone = policy.evict(SLOTS)
    assert gone is not None
    assert {*gone} == blocks
