"""The default policy, which follows the better of two others."""

from __future__ import annotations

import random
from collections.abc import Iterator

from paceline.core.cache_policy.adaptive import Adaptive
from paceline.core.cache_policy.arc import ARC
from paceline.core.cache_policy.forecast import Forecast
from tests.core.cache_policy.policies import name
from tests.core.cache_policy.test_policies import found

SLOTS = 128


def rounds(requests: int) -> Iterator[str]:
    """Yield requests for more blocks than the memory holds, one after the other again and again."""
    return (f"round {number % (2 * SLOTS)}" for number in range(requests))


def drifting(requests: int, seed: int = 0) -> Iterator[str]:
    """Yield requests for a few blocks that are new every now and then."""
    draw = random.Random(seed)
    return (f"{number // 1000} of {int(draw.expovariate(1 / SLOTS))}" for number in range(requests))


def test_it_finds_nearly_as_much_as_the_better_of_both() -> None:
    policies = Adaptive(SLOTS), Forecast(SLOTS), ARC(SLOTS)
    for load in (rounds, drifting):
        texts = list(load(20_000))
        hits, *others = (found(policy, texts) for policy in policies)
        assert hits > 0.97 * max(others)


def test_a_new_leader_chooses_among_all_blocks_at_once() -> None:
    policy = Adaptive(SLOTS)
    found(policy, [*rounds(2000), *drifting(20_000)])
    leaders = set()
    for text in drifting(20_000, seed=1):
        found(policy, [text])
        leaders.add(type(policy._leader))
    gone = policy.evict(SLOTS)
    assert gone is not None
    assert len({*gone}) == SLOTS
    assert name("") not in gone
