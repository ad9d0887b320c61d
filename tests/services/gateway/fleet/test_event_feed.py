"""One stream carries the events of all attempts on a worker."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from paceline.core.types import Token
from paceline.proto import worker_pb2
from paceline.services.gateway.fleet.event_feed import EventFeed, FeedError, Inbox
from tests.services.gateway.conftest import PATIENCE, Cluster, Reader, StartStack, eventually
from tests.services.gateway.toy_workers import TEXT

pytestmark = pytest.mark.slow


async def test_attempts_share_a_stream_until_it_breaks(cluster: Cluster) -> None:
    worker = await cluster.add("d")
    feed = cluster.fleet.worker("d").feed
    inboxes = [Inbox(), Inbox()]
    first, second = await asyncio.gather(*(feed.join(inbox) for inbox in inboxes))
    assert first.stream == second.stream
    assert first.attempt != second.attempt
    outbox = worker.outboxes.of(first)
    async with asyncio.timeout(PATIENCE):
        for attempt in (second.attempt, first.attempt, 99, second.attempt):
            outbox.event(attempt).alive.SetInParent()
        for inbox, own in ((inboxes[0], first), (inboxes[1], second), (inboxes[1], second)):
            event = await inbox.get()
            assert isinstance(event, worker_pb2.DecodeEvent)
            assert event.attempt == own.attempt
        feed.leave(first)
        worker.streams[0].cancel()
        assert isinstance(await inboxes[1].get(), FeedError)
        assert inboxes[0].is_empty
        again = await feed.join(inboxes[0])
        assert again.stream != first.stream
    assert len(worker.streams) == 2


async def test_a_socket_of_another_host_is_no_hindrance(cluster: Cluster) -> None:
    worker = await cluster.add("d")
    feed = EventFeed(cluster.fleet.worker("d").channel, "d", "/nowhere/events.sock")
    recipient = await feed.join(Inbox())
    assert recipient.stream in worker.outboxes._by_name


async def test_a_broken_stream_costs_an_attempt(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0)
    worker = stack.workers["decode-0"]
    worker.pause_after = 5
    reader = Reader(stack, max_tokens=40)
    await eventually(lambda: reader.text == TEXT[:5])
    worker.pause_after = None
    worker.streams[0].cancel()
    assert await reader.task == TEXT[:40]
    assert worker.outcomes() == ["cancelled", "finished"]


async def test_a_break_ends_the_prefill_at_once(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=1)
    decode, prefill = stack.workers["decode-0"], stack.workers["prefill-0"]
    prefill.pause_after = 1
    reader = Reader(stack, max_tokens=40)
    await eventually(lambda: reader.text == TEXT[:1])
    decode.streams[0].cancel()
    await eventually(lambda: prefill.outcomes()[:1] == ["cancelled"])
    prefill.pause_after = None
    prefill.resume.set()
    assert await reader.task == TEXT[:40]


async def test_who_does_not_read_holds_up_nobody_else(cluster: Cluster) -> None:
    worker = await cluster.add("d")
    feed, inboxes = cluster.fleet.worker("d").feed, [Inbox(), Inbox()]
    unread, read = [await feed.join(inbox) for inbox in inboxes]
    outbox = worker.outboxes.of(read)
    async with asyncio.timeout(PATIENCE):
        for number in range(1000):
            for recipient in (unread, read):
                outbox.token(recipient.attempt, Token(number))
            outbox.end_message()
            assert await inboxes[1].get() == [Token(number)]
        for number in range(1000):
            assert await inboxes[0].get() == [Token(number)]


async def test_tokens_that_are_taken_as_they_come_keep_their_place() -> None:
    inbox, taken = Inbox(), list[Token]()

    def take(tokens: list[Token]) -> None:
        taken.extend(tokens)
        if Token(4) in tokens:
            raise ValueError("enough")

    inbox.put([Token(1)])
    inbox.divert(taken.extend)
    inbox.put([Token(2)])
    assert [await inbox.get(), await inbox.get()] == [[Token(1)], [Token(2)]]
    inbox.divert(take)
    for number in (3, 4, 5):
        inbox.put([Token(number)])
    assert taken == [Token(3), Token(4)]
    with pytest.raises(ValueError, match="enough"):
        raise cast("Exception", await inbox.get())
    assert await inbox.get() == [Token(5)]


async def test_a_worker_that_ends_a_call_without_a_word_has_failed(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=2)
    worker = stack.workers["decode-0"]

    async def say_little(call, work, position, context) -> None:  # type: ignore[no-untyped-def]
        token, _ = worker.token(work, position)
        call.tell(tokens=worker_pb2.Tokens(tokens=[token]))

    worker.recite = say_little  # type: ignore[method-assign]
    assert await Reader(stack, max_tokens=40).task == TEXT[:40]
    assert stack.workers["decode-1"].calls[0].work.key.attempt == 2
