"""The socket on which gateways on a worker's host read events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paceline.core.types import Token
from paceline.proto import worker_pb2
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import open_channel
from paceline.services.common.unix_socket import Framed, UnixListener, socket_address
from paceline.services.decode.outbox import MAX_TOKENS, EventConnection, Outboxes
from paceline.services.gateway.fleet.event_feed import EventFeed, FeedError, Inbox

PATIENCE = 20.0


class Worker:
    """The part of a decode worker that sends events. Nothing answers at its gRPC address."""

    def __init__(self, folder: Path) -> None:
        self.outboxes = Outboxes()
        self.listener = UnixListener(folder, lambda: EventConnection(self.outboxes))

    def feed(self) -> EventFeed:
        return EventFeed(open_channel("127.0.0.1:9", Credentials()), "the worker", str(self.listener.path))

    async def connect(self, framed: Framed) -> None:
        with socket_address(self.listener.path) as address:
            await asyncio.get_running_loop().create_unix_connection(lambda: framed, address)


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(tmp_path)
    await worker.listener.start()
    async with asyncio.timeout(PATIENCE):
        yield worker
    await worker.listener.close()


async def test_events_come_until_the_worker_ends(worker: Worker) -> None:
    feed, inbox = worker.feed(), Inbox()
    recipient = await feed.join(inbox)
    outbox = worker.outboxes.of(recipient)
    outbox.token(recipient.attempt, Token(7))
    outbox.event(recipient.attempt).alive.SetInParent()
    assert await inbox.get() == [Token(7)]
    event = await inbox.get()
    assert isinstance(event, worker_pb2.DecodeEvent)
    assert event.HasField("alive")
    await worker.listener.close()
    assert isinstance(await inbox.get(), FeedError)
    with pytest.raises(FeedError):
        await feed.join(inbox)  # neither over the socket nor over gRPC


@pytest.mark.slow
async def test_what_a_gateway_does_not_read_waits_in_the_outbox(worker: Worker) -> None:
    ended = asyncio.Event()
    heard: list[int] = []
    framed = Framed(lambda message: heard.extend(worker_pb2.DecodeEvents.FromString(message).token_ids), ended.set)
    await worker.connect(framed)
    framed.send(worker_pb2.EventsRequest(stream="slow"))
    await asyncio.sleep(0.05)
    assert framed.transport is not None
    framed.transport.pause_reading()
    outbox, count = worker.outboxes.of(worker_pb2.Recipient(stream="slow")), 2000 * MAX_TOKENS
    for number in range(count):
        outbox.token(1, Token(number))
    await asyncio.sleep(0.05)
    assert outbox.is_writing
    framed.transport.resume_reading()
    await outbox.flush()
    while len(heard) < count:
        await asyncio.sleep(0.01)
    assert heard == list(range(count))
    framed.abort()
    await ended.wait()


async def test_a_gateway_that_lets_go_ends_its_connection(worker: Worker) -> None:
    feed, inbox = worker.feed(), Inbox()
    recipient = await feed.join(inbox)
    await feed.close()
    assert isinstance(await inbox.get(), FeedError)
    while recipient.stream in worker.outboxes._by_name:
        await asyncio.sleep(0)


@pytest.mark.parametrize("second", [worker_pb2.EventsRequest(stream="other").SerializeToString(), b"\xff"])
async def test_a_connection_carries_one_stream(worker: Worker, second: bytes) -> None:
    ended = asyncio.Event()
    framed = Framed(lambda message: None, ended.set)
    await worker.connect(framed)
    framed.send(worker_pb2.EventsRequest(stream="one"))
    assert framed.transport is not None
    framed.transport.write(len(second).to_bytes(4, "big") + second)
    await ended.wait()


async def test_a_name_that_is_taken_ends_the_connection(worker: Worker) -> None:
    ended = [asyncio.Event(), asyncio.Event()]
    for event in ended:
        framed = Framed(lambda message: None, event.set)
        await worker.connect(framed)
        framed.send(worker_pb2.EventsRequest(stream="same"))
    await ended[1].wait()
    assert not ended[0].is_set()
