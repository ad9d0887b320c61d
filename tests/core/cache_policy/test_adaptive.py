"""The default policy, which follows the better of two others."""

from __future__ import annotations

import random
from collections.abc import Iterator

from paceline.core.cache_policy.adaptive import Adaptive
from paceline.core.cache_policy.arc import ARC
from paceline.core.cache_policy.forecast import Forecast
from tests.core.cache_policy.test_policies import found, here

SLOTS = 128


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
