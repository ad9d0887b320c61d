"""The prefix index follows real kvtransfer services through a real Redis, even if events are lost on either side."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import redis.asyncio as redis

from paceline.core.block_pool import BlockEvent
from paceline.core.context import HASH_BYTES, Context, encoding_context
from paceline.core.model_folder import ModelFiles
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.credentials import Credentials
from paceline.services.common.layout import layout_from_pb
from paceline.services.common.member_signatures import UNSIGNED
from paceline.services.common.registry import Member, Registrar, connect
from paceline.services.common.secret import Secret
from paceline.services.common.streams import BlockBatch, block_keys, blocks_stream
from paceline.services.gateway.fleet.block_feed import BlockFeed
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.routing.prefix_index import PrefixIndex
from paceline.services.kvtransfer.events import BlockEventPublisher
from tests.services.gateway.conftest import eventually
from tests.services.kvtransfer.kv_host import Host, Worker, key, layout, release

pytestmark = pytest.mark.slow

NO_SECRET = Secret()
SLOTS = 8
TOKENS = list(range(1000))
LAYOUT = layout(encodings=pb.KVGroup(name="encoding", block_tokens=16))


class LiveHost:
    """A kvtransfer service as in production, with one worker."""

    def __init__(self, host: Host, worker: Worker, redis_url: str, cluster: str, epoch: int) -> None:
        self.host = host
        self.worker = worker
        self.loses = False
        """Whether block events are lost on their way to Redis."""
        self._epoch = epoch
        self._count = 0
        self._registrar = Registrar(redis_url, cluster, self._member, UNSIGNED)
        self._publisher = BlockEventPublisher(redis_url, cluster, self._take)

    @classmethod
    @contextlib.asynccontextmanager
    async def serving(
        cls, folder: Path, redis_url: str, cluster: str, name: str = "a", epoch: int = 1
    ) -> AsyncIterator[LiveHost]:
        await asyncio.to_thread(folder.mkdir, exist_ok=True)
        host = Host(folder, kv_memory=SLOTS * 4096, name=name)
        await host.start()
        live = cls(host, await host.attach(shape=LAYOUT), redis_url, cluster, epoch)
        await live._registrar.start()
        await live._publisher.start()
        yield live
        await live._publisher.stop()
        await live._registrar.stop()
        await host.close()

    def _take(self) -> BlockBatch | None:
        taken = self.host.service.take_events()
        return None if self.loses else taken

    def _member(self) -> Member:
        report = self.host.service.snapshot().report()
        name = self.host.service._options.host_id
        return Member(name, "kvtransfer", self._epoch, self.host.address, name, host=report)

    async def cache(self, tokens: list[int]) -> None:
        """Cache a context. Others are evicted if there is no room."""
        await self._cache(Context(tokens).links("model-a"))

    async def cache_encoding(self, digest: bytes, length: int) -> None:
        layout = layout_from_pb(LAYOUT)
        await self._cache(encoding_context(digest, length, "", layout).links("model-a"), encoding=True)

    async def _cache(self, links: Sequence[bytes], encoding: bool = False) -> None:
        self._count += 1
        of, count = key(f"r{self._count}"), len(links)
        reserve = pb.Reserve(key=of, hashes=links, token_count=count * 16, encoding=encoding)
        await self.worker.do(pb.Operation(reserve=reserve))
        await self.worker.do(pb.Operation(seal=pb.Seal(key=of, group=0, first_block=0, hashes=links)))
        await self.worker.do(pb.Operation(release=release(of).release))


class Gateway:
    """The parts of a gateway that follow the hosts' blocks."""

    def __init__(self, redis_url: str, cluster: str) -> None:
        self.redis = connect(redis_url)
        self.stream = blocks_stream(cluster)
        self.index = PrefixIndex()
        self.fleet = Fleet(self.redis, cluster, ModelFiles("", {}), Credentials())
        self.feed = BlockFeed(self.redis, cluster, self.fleet.hosts, self.index)

    async def __aenter__(self) -> Gateway:
        await self.fleet.start()
        self.feed.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.feed.close()
        await self.fleet.close()
        await self.redis.aclose()

    async def comes_to_see(self, **tokens: int) -> None:
        """Wait until the index has exactly these hosts, with this many cached tokens of TOKENS each."""
        await eventually(lambda: self.index.cached_tokens(Context(TOKENS), 1000) == tokens)


@pytest.fixture
def cluster() -> str:
    return uuid.uuid4().hex


async def test_what_was_there_before_and_what_comes_later(tmp_path: Path, redis_server: str, cluster: str) -> None:
    async with LiveHost.serving(tmp_path, redis_server, cluster) as host:
        await host.cache(TOKENS[:32])
        async with Gateway(redis_server, cluster) as gateway:
            await gateway.comes_to_see(a=32)
            await host.cache(TOKENS[:64])
            await gateway.comes_to_see(a=64)
            await host.cache(TOKENS[500 : 500 + 16 * SLOTS])  # evicts all other blocks
            await gateway.comes_to_see()


async def test_encodings_are_followed_as_well(tmp_path: Path, redis_server: str, cluster: str) -> None:
    async with LiveHost.serving(tmp_path, redis_server, cluster) as host:
        await host.cache_encoding(b"before", 40)
        async with Gateway(redis_server, cluster) as gateway:
            index = gateway.index
            await eventually(lambda: index.encoding_hosts(b"before", 40, "") == ["a"])
            await host.cache_encoding(b"later", 16)
            await eventually(lambda: index.encoding_hosts(b"later", 16, "") == ["a"])
            await host.cache(TOKENS[: 16 * SLOTS])  # evicts all other blocks
            await eventually(lambda: index.encoding_hosts(b"before", 40, "") == [])
            assert index.encoding_hosts(b"later", 16, "") == []


async def test_what_came_while_nobody_read_is_asked_for(tmp_path: Path, redis_server: str, cluster: str) -> None:
    async with (
        LiveHost.serving(tmp_path, redis_server, cluster) as host,
        Gateway(redis_server, cluster) as gateway,
    ):
        await host.cache(TOKENS[:32])
        await gateway.comes_to_see(a=32)
        host.loses = True
        await host.cache(TOKENS[:64])
        # No more events come through the stream. The heartbeat shows that events are missing.
        await gateway.comes_to_see(a=64)
        host.loses = False
        await host.cache(TOKENS[:96])
        await gateway.comes_to_see(a=96)


async def test_a_stream_that_is_gone_begins_anew(tmp_path: Path, redis_server: str, cluster: str) -> None:
    async with (
        LiveHost.serving(tmp_path, redis_server, cluster) as host,
        Gateway(redis_server, cluster) as gateway,
    ):
        await host.cache(TOKENS[:32])
        await gateway.comes_to_see(a=32)
        client = redis.Redis.from_url(redis_server)
        await client.delete(gateway.stream)
        await client.xadd(gateway.stream, {"what": "a stranger's"})
        await client.aclose()
        await host.cache(TOKENS[:64])
        await gateway.comes_to_see(a=64)


async def test_a_host_that_starts_again_or_leaves_is_forgotten(tmp_path: Path, redis_server: str, cluster: str) -> None:
    async with Gateway(redis_server, cluster) as gateway:
        async with LiveHost.serving(tmp_path / "1", redis_server, cluster) as first:
            await first.cache(TOKENS[:64])
            await gateway.comes_to_see(a=64)
        async with LiveHost.serving(tmp_path / "2", redis_server, cluster, epoch=2) as second:
            await gateway.comes_to_see()
            await second.cache(TOKENS[:32])
            await gateway.comes_to_see(a=32)
        await gateway.comes_to_see()
        assert gateway.index.hosts() == []


async def test_each_host_is_followed(tmp_path: Path, redis_server: str, cluster: str) -> None:
    async with (
        LiveHost.serving(tmp_path / "1", redis_server, cluster, "a") as one,
        LiveHost.serving(tmp_path / "2", redis_server, cluster, "b") as other,
        Gateway(redis_server, cluster) as gateway,
    ):
        await one.cache(TOKENS[:32])
        await other.cache(TOKENS[:80])
        await gateway.comes_to_see(a=32, b=80)


class Reader:
    """A feed whose batches go to a list."""

    def __init__(
        self, redis_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch, secret: Secret = NO_SECRET
    ) -> None:
        self.redis = connect(redis_url)
        self.came: list[BlockBatch] = []
        self._feed = BlockFeed(self.redis, cluster, list, PrefixIndex(), secret)
        monkeypatch.setattr(self._feed, "_take", self.came.append)

    async def __aenter__(self) -> Reader:
        self._feed.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._feed.close()
        await self.redis.aclose()


def batch_of(number: int) -> BlockBatch:
    return BlockBatch("a", "p", number, (BlockEvent("stored", 0, bytes(HASH_BYTES)),))


async def test_events_go_on_after_an_entry_with_the_largest_id(
    redis_server: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write to Redis. Redis adds no entry after this one, so the stream must begin again."""
    left = [batch_of(0)]
    publisher = BlockEventPublisher(redis_server, cluster, lambda: left.pop() if left else None)
    async with Reader(redis_server, cluster, monkeypatch) as reader:
        await publisher.start()
        await eventually(lambda: reader.came == [batch_of(0)])
        largest = "18446744073709551615-18446744073709551615"
        await reader.redis.xadd(blocks_stream(cluster), {"x": "y"}, id=largest)
        left.append(batch_of(1))
        await eventually(lambda: reader.came == [batch_of(0), batch_of(1)])
        await publisher.stop()


async def test_events_without_the_secret_are_ignored(
    redis_server: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Secret("the secret of this cluster"), Secret("the secret of another one")
    async with Reader(redis_server, cluster, monkeypatch, ours) as reader:
        for number, secret in enumerate((NO_SECRET, theirs, ours)):
            (key,) = block_keys(secret, cluster) or (b"",)
            await reader.redis.xadd(blocks_stream(cluster), batch_of(number).to_entry(key))  # type: ignore[arg-type]
        left = [batch_of(3)]
        publisher = BlockEventPublisher(redis_server, cluster, lambda: left.pop() if left else None, secret=ours)
        await publisher.start()
        await eventually(lambda: reader.came == [batch_of(2), batch_of(3)])
        await publisher.stop()
