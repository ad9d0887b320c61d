"""The default policy, which learns which blocks to keep."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable

import pytest

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.forecast import Forecast
from paceline.core.cache_policy.hazard import HORIZON
from paceline.core.cache_policy.lru import LRU
from tests.core.cache_policy.policies import name
from tests.core.cache_policy.test_policies import found

SLOTS = 64


def learner(slots: int) -> Forecast:
    return Forecast(slots, remembered=16 * slots)


def hits(make: Callable[[int], CachePolicy], texts: Iterable[str]) -> int:
    """Return the hits in the second half of the requests. The policy learns from the first half."""
    asked = list(texts)
    policy = make(SLOTS)
    found(policy, asked[: len(asked) // 2])
    return found(policy, asked[len(asked) // 2 :])


def test_where_nothing_is_known_what_was_used_least_often_and_longest_ago_goes_first() -> None:
    policy = Forecast(4)
    found(policy, ["a", "b", "c", "a", "d"])
    assert policy.evict(4) == [name("b"), name("c"), name("d"), name("a")]


def test_it_gives_up_what_is_read_once() -> None:
    draw = random.Random(0)
    scan = (f"once {number}" for number in itertools.count())
    texts = [f"popular {draw.randrange(60)}" if draw.random() < 0.3 else next(scan) for _ in range(8000)]
    assert hits(learner, texts) > 1.5 * hits(LRU, texts)


def test_it_keeps_a_part_of_a_round_that_is_too_large() -> None:
    texts = [f"{number % (2 * SLOTS)}" for number in range(8000)]
    assert hits(LRU, texts) == 0
    assert hits(learner, texts) > 0.3 * 4000


def test_it_is_as_good_as_lru_where_that_is_best() -> None:
    # The most recently used block is the most likely to be used next.
    draw = random.Random(0)
    stack = [f"{number}" for number in range(4 * SLOTS)]
    texts = []
    for _ in range(8000):
        text = stack.pop(min(int(draw.expovariate(1 / 40)), len(stack) - 1))
        stack.insert(0, text)
        texts.append(text)
    assert hits(learner, texts) > 0.97 * hits(LRU, texts)


@pytest.mark.slow
def test_it_remembers_what_has_gone_and_not_for_ever() -> None:
    policy = learner(SLOTS)
    found(policy, (f"{number}" for number in range(6_000)))
    assert SLOTS < len(policy.history) <= 16 * SLOTS + SLOTS + 16 * SLOTS // HORIZON
