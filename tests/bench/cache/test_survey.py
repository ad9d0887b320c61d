"""Cache policies beside their rivals."""

from __future__ import annotations

import pytest

from bench.cache.survey import compare


@pytest.mark.slow
def test_the_default_policy_finds_what_the_better_rival_finds() -> None:
    (ratio,) = compare("system-prompts", 7, 100, "adaptive")
    assert ratio > 0.99


def test_a_rival_alone_is_no_better_than_the_better_rival() -> None:
    (ratio,) = compare("changing", 7, 10, "lru")
    assert ratio <= 1
