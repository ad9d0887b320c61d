"""A prefix in the cache of one host is copied to the cache of another host, between two real services."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.tasks import end_tasks
from paceline.services.kvtransfer.operations import key_of
from paceline.services.kvtransfer.transfers import prefixes
from paceline.services.kvtransfer.transfers.exports import Exports, Write
from tests.services.kvtransfer.kv_host import SLOT, key, layout, release, reserve
from tests.services.kvtransfer.kv_pair import CONTEXT, SLOTS, Pair, failure, offering, pair
from tests.services.kvtransfer.kv_toolkit import chain

Call = grpc.aio.UnaryUnaryCall


async def cache(two: Pair, context: str = CONTEXT) -> pb.Lease:
    """Cache a context at the source, and return the lease that its blocks had."""
    of = key(f"cache {context}")
    lease = (await two.prefill.do(reserve(of, context))).lease
    await two.compute(lease, lease.filled_tokens // 16, len(context), context=context)
    await two.prefill.do(release(of))
    return lease


def fetch(two: Pair, context: str = CONTEXT, name: str = "r", source: str | None = None) -> Call:
    request = pb.FetchPrefixRequest(
        session=two.decode.arena.session, key=key(name), source=source or two.source.address, hashes=chain(context)
    )
    return two.destination.stub.FetchPrefix(request, timeout=30)


async def found(two: Pair, context: str = CONTEXT, name: str = "r") -> pb.Lease:
    """Reserve a context at the destination, release it and return the lease.

    The lease has room for one more token, so that all blocks of the context may be reused.
    """
    lease = (await two.decode.do(reserve(key(name), context, 16 * len(context) + 1))).lease
    await two.decode.do(release(lease.key))
    return lease


async def test_whoever_reserves_finds_what_came(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await cache(two)
        reply = await fetch(two, CONTEXT + "xy")
        assert (reply.blocks, reply.bytes, reply.path) == (6, 6 * SLOT, "grpc")
        lease = await found(two, CONTEXT + "xy")  # even with the key for which it was fetched
        assert lease.filled_tokens == 6 * 16
        two.check(lease, 0, 6)
        await two.end()
        assert (await two.destination.ledger()).prefix_queries_tokens == 8 * 16  # the fetch is no query


async def test_only_what_lacks_is_brought(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await cache(two, "ab")
        await fetch(two, "ab", "first")
        await cache(two)
        assert (await fetch(two)).blocks == 4
        lease = await found(two)
        assert lease.filled_tokens == 6 * 16
        two.check(lease, 0, 6)
        assert (await fetch(two, name="again")).blocks == 0
        await two.end()


async def test_that_there_is_nothing_is_a_success(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reply = await fetch(two)
        assert (reply.blocks, reply.path) == (0, "")
        assert (await found(two)).filled_tokens == 0
        await two.end()
        assert (await two.destination.ledger()).free == SLOTS


async def test_of_a_window_only_what_is_still_seen_is_brought(tmp_path: Path) -> None:
    shape = layout(groups=((32, 0), (16, 20)))
    async with pair(tmp_path, shape) as two:
        of = key("cache")
        lease = (await two.prefill.do(reserve(of, CONTEXT))).lease
        for index in range(3):
            two.contents[0, index] = bytes([index]) * SLOT
            two.there.write(lease.tables[0].slots[index], two.contents[0, index])
        seal = pb.Seal(key=of, group=0, first_block=0, hashes=chain(CONTEXT)[1::2])
        await two.prefill.do(pb.Operation(seal=seal))
        await two.compute(lease, 0, 6, group=1)
        await two.prefill.do(release(of))
        assert (await fetch(two)).blocks == 3 + 2
        lease = await found(two)
        assert lease.filled_tokens == 6 * 16
        two.check(lease, 0, 3, group=0)
        two.check(lease, 4, 6, group=1)
        await two.end()


async def test_what_is_read_is_not_evicted_and_belongs_to_nobody_afterwards(tmp_path: Path) -> None:
    written: list[pb.ExportEvent] = []

    async def write(event: pb.ExportEvent) -> None:
        written.append(event)

    async with pair(tmp_path) as two:
        await cache(two)
        memory = two.source.service.sessions.memory
        assert memory is not None
        run = asyncio.create_task(memory.exports.run_prefix(key_of(key()), chain(CONTEXT), 0, write))
        ledger = await two.source.until(lambda reply: reply.held == 6)
        assert [lease.owner for lease in ledger.leases] == ["kvtransfer"]
        too_much = pb.Reserve(key=key("other"), token_count=16 * SLOTS)
        (refused,) = await two.prefill.batch(pb.Operation(reserve=too_much))
        assert refused.code == pb.CODE_EXHAUSTED
        async with asyncio.timeout(10):
            while len(written) < 2:
                await asyncio.sleep(0.01)
        assert written[-1].exported.filled_tokens == 6 * 16
        await end_tasks(run)
        assert (await two.source.ledger()).cached == 6
        await two.end()


async def test_a_source_that_cannot_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await cache(two)
        offering(two.source, "carrier pigeon")
        for source in (None, "127.0.0.1:1"):
            error = await failure(fetch(two, source=source, name=f"from {source}"))
            assert error.code() is grpc.StatusCode.DATA_LOSS
        assert (await found(two)).filled_tokens == 0
        await two.end()
        assert two.destination.service.snapshot().transfers.failures == 2


async def test_blocks_of_another_context_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Exports.run_prefix

    async def lying(
        self: Exports, of: Key, hashes: Sequence[bytes], cached_tokens: int, write: Write, encoding: bool
    ) -> None:
        await honest(self, of, chain("uvwxyz"), cached_tokens, write)

    async with pair(tmp_path) as two:
        await cache(two, "uvwxyz")
        monkeypatch.setattr(Exports, "run_prefix", lying)
        error = await failure(fetch(two))
        assert "another context" in (error.details() or "")
        assert (await found(two)).filled_tokens == 0
        await two.end()


async def test_a_slow_source_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "PREFIX_SECONDS", 0.2)

    async def silent(
        self: Exports, of: Key, hashes: Sequence[bytes], cached_tokens: int, write: Write, encoding: bool
    ) -> None:
        await asyncio.sleep(60)

    async with pair(tmp_path) as two:
        monkeypatch.setattr(Exports, "run_prefix", silent)
        error = await failure(fetch(two))
        assert error.code() is grpc.StatusCode.DATA_LOSS
        await two.end()


async def test_who_has_no_room_for_it_is_told(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await cache(two)
        await two.decode.do(reserve(key("all"), tokens=16 * (SLOTS - 2)))
        assert (await failure(fetch(two))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await two.end(key("all"))


async def test_a_call_that_is_cancelled_gives_its_blocks_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(
        self: Exports, of: Key, hashes: Sequence[bytes], cached_tokens: int, write: Write, encoding: bool
    ) -> None:
        await asyncio.sleep(60)

    async with pair(tmp_path) as two:
        monkeypatch.setattr(Exports, "run_prefix", silent)
        call = fetch(two)
        reading = asyncio.ensure_future(call)
        await two.destination.until(lambda reply: reply.held == 6)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await two.end()
