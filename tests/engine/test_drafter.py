"""Prompt lookup. test_decode_loop.py tests drafts by models."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.media import MediaKind, MediaSpan
from paceline.engine.drafter import PromptLookup


def lookup(context: list[int], count: int = 4, shortest: int = 2, longest: int = 4) -> list[int]:
    return PromptLookup(shortest, longest).lookup(np.array(context, dtype=np.int32), count)


def test_what_followed_before_is_proposed() -> None:
    assert lookup([1, 2, 3, 4, 5, 6, 9, 1, 2]) == [3, 4, 5, 6]
    assert lookup([1, 2, 3, 4, 1, 2], count=2) == [3, 4]


def test_the_longest_agreement_wins_and_among_equals_the_newest() -> None:
    assert lookup([7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2], count=1) == [50]
    assert lookup([1, 2, 50, 1, 2, 60, 9, 1, 2], count=1) == [60]


def test_too_little_agreement_is_no_idea() -> None:
    assert lookup([1, 2, 3, 9, 2]) == []
    assert lookup([1, 2, 3, 9, 2], shortest=1) == [3, 9, 2]
    assert lookup([5]) == []


def test_placeholder_tokens_are_never_proposed() -> None:
    context = [1, 2, 3, 100, 100, 4, 1, 2]

    def found(start: int, length: int) -> list[int]:
        span = MediaSpan(start, length, b"digest", MediaKind.IMAGE)
        return PromptLookup(2, 4).lookup(np.array(context, dtype=np.int32), 6, [span])

    assert found(3, 2) == [3]
    assert found(2, 3) == []  # what followed begins with the span
    assert found(0, 2) == [3, 100, 100, 4, 1, 2]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 3), st.integers(3, 5))
def test_a_proposal_has_followed_the_end_before(context: list[int], count: int, shortest: int, longest: int) -> None:
    proposal = lookup(context, count, shortest, longest)
    assert len(proposal) <= count
    known = [
        agreed
        for agreed in range(shortest, longest + 1)
        for begin in range(len(context) - agreed)
        if context[begin : begin + agreed] == context[-agreed:]
    ]
    assert bool(proposal) == bool(known)
    if proposal:
        pattern = context[-max(known) :] + proposal
        assert any(context[begin : begin + len(pattern)] == pattern for begin in range(len(context)))
