"""Outcomes that are remembered: for their owners alone, and not too many."""

from __future__ import annotations

from paceline.core.errors import InvalidRequestError
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.planning.constraints.known import KnownOutcomes


def constraint(size: int) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, "x" * size, frozenset({1}))


def test_an_outcome_is_its_owner_s_alone() -> None:
    known, error = KnownOutcomes(1 << 20), InvalidRequestError("wrong", "tools")
    known.add("a", b"1", error)
    known.add("a", b"2", None)
    assert known.find("a", b"1") == (error,)
    assert known.find("a", b"2") == (None,)
    assert known.find("b", b"1") is None
    assert known.find("a", b"3") is None


def test_the_owner_with_the_most_bytes_loses_its_oldest_outcomes() -> None:
    known = KnownOutcomes(40_000)
    known.add("small", b"0", constraint(1000))
    for number in range(9):
        known.add("large", bytes([number]), constraint(8000))
        known.find("large", b"\0")
    kept = [number for number in range(9) if known.find("large", bytes([number]))]
    assert kept == [0, 6, 7, 8]  # the first one was in use
    assert known.find("small", b"0")


def test_one_outcome_may_be_too_large() -> None:
    known = KnownOutcomes(10_000)
    known.add("a", b"0", constraint(20_000))
    assert known.find("a", b"0") is None
    known.add("a", b"1", constraint(10))
    assert known.find("a", b"1")
