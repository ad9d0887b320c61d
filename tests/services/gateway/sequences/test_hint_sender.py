"""Hints that wait to be sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from paceline.core.cache_policy.hints import Hint
from paceline.core.context import Context
from paceline.core.kv_layout import BASE_TOKENS
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.gateway.sequences.notices import MOST_WAITING, MOST_WAITING_BYTES, HintSender, WaitingHints


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


class SlowSender(HintSender):
    """Sends nothing, and does not end doing so for one host before it answers."""

    def __init__(self) -> None:
        super().__init__(lambda host_id: None)
        self.sent: list[tuple[str, int]] = []
        self.answers = asyncio.Event()

    async def _send(self, host_id: str, expected: Iterable[pb.Expectation]) -> None:
        self.sent.append((host_id, len(list(expected))))
        if host_id == "slow":
            await self.answers.wait()


async def test_a_host_that_does_not_answer_keeps_no_other_one_waiting() -> None:
    sender = SlowSender()
    context, hints = Context(range(BASE_TOKENS)), [Hint(BASE_TOKENS, 10.0, b"")]
    for _ in range(3):
        sender.put({"slow": "layout", "live": "layout"}, context, hints)
        await asyncio.sleep(0.001)
    assert sender.sent == [("slow", 1), ("live", 1), ("live", 1), ("live", 1)]
    sender.answers.set()
    await asyncio.sleep(0.001)
    assert sender.sent[4:] == [("slow", 2)]
    await sender.close()
    sender.put({"live": "layout"}, context, hints)
    await asyncio.sleep(0.001)
    assert len(sender.sent) == 5
