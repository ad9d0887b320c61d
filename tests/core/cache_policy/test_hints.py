"""Hints about blocks: what they are worth, and what wrong ones cost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from paceline.core.cache_policy.adaptive import Adaptive
from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.forecast import Forecast
from paceline.core.cache_policy.hints import Hint
from paceline.core.cache_policy.ranking import NOWHERE
from tests.core.cache_policy.policies import name
from tests.core.cache_policy.test_policies import found, here, use

SLOTS = 64


@pytest.mark.parametrize("make", [Forecast, Adaptive])
def test_a_hinted_block_outlives_a_flood(make: Callable[[int], CachePolicy]) -> None:
    policy = make(8)
    found(policy, ["a", "b"])
    policy.expect(name("a"), Hint(16, 60.0))
    found(policy, [f"flood {number}" for number in range(50)])
    assert name("a") in here(policy)
    assert name("b") not in here(policy)


def flood(policy: CachePolicy, hints_of_flood: bool, seed: int = 0) -> tuple[int, int]:
    """Return the hits of an agent, whose blocks come back and are hinted, and of scans, whose blocks hardly do.

    Args:
        hints_of_flood: whether the scans hint all of their blocks, too.
    """
    draw = random.Random(seed)
    steps = itertools.count()
    hits = [0, 0]
    agent: list[str] = []

    def scan() -> Iterator[str]:
        while True:
            yield f"scan {next(steps)}"

    scans = scan()
    for _ in range(400):
        for text in list(agent):
            hits[0] += use(policy, text)
            policy.expect(name(text), Hint(16, 60.0, b"agent"))
        agent = [*agent[-20:], f"agent {next(steps)}"] if len(agent) < 24 else [f"agent {next(steps)}"]
        for text in itertools.islice(scans, draw.randint(5, 30)):
            hits[1] += use(policy, text)
            if hints_of_flood:
                policy.expect(name(text), Hint(16, 60.0, b"scan"))
    return hits[0], hits[1]


@pytest.mark.parametrize("make", [lambda slots: Forecast(slots, 1 << 13), Adaptive])
def test_a_client_that_hints_everything_gains_nothing(make: Callable[[int], CachePolicy]) -> None:
    fair, _ = flood(make(SLOTS), hints_of_flood=False)
    beside, _ = flood(make(SLOTS), hints_of_flood=True)
    assert beside >= 0.9 * fair


def test_background_work_goes_first() -> None:
    policy = Forecast(4)
    for number, text in enumerate("abcd"):
        use(policy, text, NOWHERE._replace(priority=number % 2))
    assert policy.evict(2) == [name("b"), name("d")]
