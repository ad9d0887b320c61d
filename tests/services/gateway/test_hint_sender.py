"""Hints that wait to be sent."""

from __future__ import annotations

from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.gateway.hint_sender import MOST_WAITING, MOST_WAITING_BYTES, WaitingHints


def test_too_many_contexts_drop_the_oldest() -> None:
    waiting = WaitingHints()
    for number in range(MOST_WAITING + 2):
        waiting.add(pb.Expectation(hashes=number.to_bytes(16)))
    assert len(waiting.expectations) == MOST_WAITING
    assert waiting.expectations[0].hashes == (2).to_bytes(16)


def test_too_long_contexts_drop_the_oldest() -> None:
    waiting = WaitingHints()
    third = bytes(MOST_WAITING_BYTES // 3)
    for _ in range(5):
        waiting.add(pb.Expectation(hashes=third))
    assert len(waiting.expectations) == 3
