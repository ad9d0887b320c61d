"""Hints that come before their blocks."""

from __future__ import annotations

from paceline.core.cache_policy.hints import Hint
from paceline.services.kvtransfer.ledger.hints import EARLY_SECONDS, MOST_EARLY, EarlyHints
from tests.services.kvtransfer.kv_toolkit import Desk, chain

HINT, OTHER = Hint(16, 60.0), Hint(16, 900.0)
A, B = (0, b"a"), (0, b"b")


def test_a_hint_is_taken_once_and_the_newest_counts() -> None:
    hints = EarlyHints()
    hints.put(A, HINT, 1.0)
    hints.put(A, OTHER, 2.0)
    assert hints.take(B, 2.0) is None
    assert hints.take(A, 2.0) == OTHER
    assert hints.take(A, 2.0) is None


def test_old_hints_are_dropped() -> None:
    hints = EarlyHints()
    hints.put(A, HINT, 1.0)
    hints.put(B, HINT, 2.0)
    assert hints.take(A, 1.5 + EARLY_SECONDS) is None
    assert hints.take(B, 1.5 + EARLY_SECONDS) == HINT


def test_too_many_hints_drop_the_oldest() -> None:
    hints = EarlyHints()
    for index in range(MOST_EARLY + 1):
        hints.put((0, index.to_bytes(4)), HINT, 1.0)
    assert hints.take((0, (0).to_bytes(4)), 1.0) is None
    assert hints.take((0, (1).to_bytes(4)), 1.0) == HINT


def test_a_ledger_keeps_a_hint_for_a_block_that_is_sealed_later() -> None:
    desk = Desk(4)
    lease = desk.reserve("r", "ab")
    first, second = chain("ab")
    desk.ledger.expect(0, first, HINT, desk.now)
    assert desk.ledger.hint_counts.hinted == 0
    desk.seal(lease, "ab")
    assert desk.ledger.hint_counts.hinted == 1
    desk.ledger.expect(0, second, HINT, desk.now)
    assert desk.ledger.hint_counts.hinted == 2
    assert desk.counts() == (2, 2, 0, 0)
