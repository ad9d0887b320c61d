"""The service over a real gRPC server and a real arena."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paceline.core.errors import ConfigError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.proto.common_pb2 import Key
from paceline.services.common.arena_map import map_arena
from paceline.services.common.rpc import RpcServer, open_channel
from paceline.services.kvtransfer.service import KVTransferService
from tests.services.kvtransfer.kv_toolkit import LEASE, chain

SLOT = 4096
SLOTS = 8


def layout(slot_bytes: int = SLOT, groups: tuple[tuple[int, int], ...] = ((16, 0),), **fields: object) -> pb.KVLayout:
    made = [pb.KVGroup(name=f"g{i}", block_tokens=tokens, window=window) for i, (tokens, window) in enumerate(groups)]
    values = {"fingerprint": "model-a", "base_tokens": 16, **fields}
    return pb.KVLayout(slot_bytes=slot_bytes, groups=made, **values)  # type: ignore[arg-type]


class Worker:
    """A worker that has attached."""

    def __init__(self, stub: pb_grpc.KVTransferAsyncStub, stream: grpc.aio.UnaryStreamCall, arena: pb.AttachEvent):
        self.stub = stub
        self.stream = stream
        self.arena = arena

    async def batch(self, *operations: pb.Operation) -> list[pb.Result]:
        request = pb.BatchRequest(session=self.arena.session, operations=operations)
        return list((await self.stub.Batch(request, timeout=10)).results)

    async def do(self, operation: pb.Operation) -> pb.Result:
        """One operation, which must succeed."""
        (result,) = await self.batch(operation)
        assert result.code == pb.CODE_OK, result.message
        return result

    async def leave(self) -> None:
        self.stream.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.stream.code()


class Host:
    """The service, its address and its time."""

    def __init__(self, folder: Path, kv_memory: int = SLOTS * SLOT) -> None:
        self.now = 1000.0
        self.folder = folder
        self.service = KVTransferService("host-1", kv_memory, folder, LEASE, clock=lambda: self.now)
        self.server = RpcServer("127.0.0.1", 0)
        pb_grpc.add_KVTransferServicer_to_server(self.service, self.server.server)

    async def start(self) -> None:
        await self.service.start()
        self.address = f"127.0.0.1:{await self.server.start()}"
        self.channel = open_channel(self.address)
        self.stub: pb_grpc.KVTransferAsyncStub = pb_grpc.KVTransferStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()
        await self.service.close()
        await self.server.close(0)

    async def attach(self, worker_id: str = "w", shape: pb.KVLayout | None = None) -> Worker:
        request = pb.AttachRequest(worker_id=worker_id, role="decode", layout=shape or layout())
        stream = self.stub.Attach(request)
        async with asyncio.timeout(10):
            arena = await stream.read()
        if not isinstance(arena, pb.AttachEvent):
            raise AssertionError(f"refused: {await stream.details()}")
        return Worker(self.stub, stream, arena)

    async def ledger(self) -> pb.LedgerReply:
        reply = await self.stub.Ledger(pb.LedgerRequest(with_holds=True), timeout=10)
        assert reply.free + reply.held + reply.in_flight + reply.cached == reply.total
        return reply

    async def counts(self) -> tuple[int, int, int, int]:
        reply = await self.ledger()
        assert reply.balanced
        return reply.free, reply.held, reply.in_flight, reply.cached

    async def until(self, condition: Callable[[pb.LedgerReply], bool]) -> pb.LedgerReply:
        async with asyncio.timeout(20):
            while not condition(reply := await self.ledger()):
                await asyncio.sleep(0.02)
        return reply


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    one = Host(tmp_path)
    await one.start()
    yield one
    await one.close()


def key(request: str = "r", attempt: int = 1, generation: int = 1) -> Key:
    return Key(request_id=request, attempt=attempt, generation=generation)


def reserve(of: Key, context: str = "", tokens: int | None = None) -> pb.Operation:
    tokens = len(context) * 16 if tokens is None else tokens
    return pb.Operation(
        reserve=pb.Reserve(key=of, hashes=chain(context), token_count=tokens, max_cached_tokens=max(0, tokens - 1))
    )


def seal(of: Key, context: str) -> pb.Operation:
    return pb.Operation(seal=pb.Seal(key=of, group=0, first_block=0, hashes=chain(context)))


def release(of: Key) -> pb.Operation:
    return pb.Operation(release=pb.Release(key=of))


# ---- joining


async def test_the_first_worker_shapes_the_arena(host: Host) -> None:
    assert (await host.ledger()).total == 0
    worker = await host.attach(shape=layout(slot_bytes=3 * 4096))
    arena = worker.arena
    assert (arena.host_id, arena.slots, arena.arena_bytes) == ("host-1", 2, 2 * 3 * 4096)
    assert arena.lease_ms == LEASE * 1000
    status = os.stat(arena.arena_path)
    assert (status.st_size, stat.S_IMODE(status.st_mode)) == (arena.arena_bytes, 0o600)
    assert (await host.ledger()).slot_bytes == 3 * 4096
    snapshot = host.service.snapshot()
    assert (snapshot.workers, snapshot.fingerprint, snapshot.healthy) == (1, "model-a", True)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (layout(slot_bytes=2 * SLOT), "its slot_bytes is 8192, that of the arena is 4096"),
        (layout(fingerprint="model-b"), "its fingerprint is model-b, that of the arena is model-a"),
        (layout(groups=((32, 0),)), "block_tokens 32 and window 0, that of the arena is 'g0' with block_tokens 16"),
        (layout(groups=((16, 64),)), "window 64, that of the arena is 'g0' with block_tokens 16 and window 0"),
        (layout(groups=((16, 0), (16, 0))), "it has 2 groups of layers, the arena 1"),
    ],
)
async def test_a_different_layout_is_refused_while_a_worker_is_there(
    host: Host, other: pb.KVLayout, difference: str
) -> None:
    worker = await host.attach("first")
    stream = host.stub.Attach(pb.AttachRequest(worker_id="second", layout=other), timeout=10)
    assert await stream.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "worker second cannot share" in await stream.details()
    assert difference in await stream.details()
    equal = await host.attach("third")
    assert equal.arena.arena_path == worker.arena.arena_path


async def test_an_arena_that_nobody_uses_takes_a_new_shape(host: Host) -> None:
    worker = await host.attach()
    await worker.do(reserve(key(), "ab"))
    await worker.leave()
    await host.until(lambda reply: reply.in_flight == 2)
    refused = host.stub.Attach(pb.AttachRequest(worker_id="w", layout=layout(fingerprint="model-b")), timeout=10)
    assert await refused.code() is grpc.StatusCode.FAILED_PRECONDITION
    host.now += 1
    await host.until(lambda reply: not reply.holds)
    again = await host.attach(shape=layout(slot_bytes=2 * SLOT, fingerprint="model-b"))
    assert again.arena.slots == SLOTS // 2
    assert again.arena.arena_path != worker.arena.arena_path
    assert [str(path) for path in host.folder.iterdir()] == [again.arena.arena_path]


async def test_an_arena_of_the_same_shape_keeps_its_cache(host: Host) -> None:
    worker = await host.attach()
    await worker.batch(reserve(key(), "ab"), seal(key(), "ab"), release(key()))
    await worker.leave()
    again = await host.attach()
    assert (await again.do(reserve(key("next"), "abc"))).hold.filled_tokens == 32


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (pb.KVLayout(), "fingerprint is empty"),
        (layout(slot_bytes=0), "slot_bytes must be a multiple of 4096"),
        (layout(slot_bytes=1000), "slot_bytes must be a multiple of 4096"),
        (layout(base_tokens=8), "base_tokens must be 16"),
        (layout(groups=()), "groups must be 1 to 64, not 0"),
        (layout(groups=((16, 0),) * 65), "groups must be 1 to 64, not 65"),
        (layout(groups=((0, 0),)), "multiples of 16"),
        (layout(groups=((24, 0),)), "multiples of 16"),
        (layout(groups=((48, 0), (32, 0))), "divide the largest"),
    ],
)
async def test_what_is_no_layout(host: Host, shape: pb.KVLayout, message: str) -> None:
    stream = host.stub.Attach(pb.AttachRequest(worker_id="w", layout=shape), timeout=10)
    assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in await stream.details()
    assert list(host.folder.iterdir()) == []


async def test_a_worker_needs_a_name(host: Host) -> None:
    stream = host.stub.Attach(pb.AttachRequest(layout=layout()), timeout=10)
    assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_block_larger_than_the_arena_names_the_flag(host: Host) -> None:
    stream = host.stub.Attach(pb.AttachRequest(worker_id="w", layout=layout(slot_bytes=1 << 20)), timeout=10)
    assert await stream.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "--kv-memory" in await stream.details()


async def test_too_little_memory_is_found_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        await KVTransferService("h", 1 << 60, tmp_path, LEASE).start()


# ---- work


async def test_a_handoff_moves_no_byte(host: Host) -> None:
    decode, prefill = await host.attach("decode"), await host.attach("prefill")
    memories = [map_arena(Path(worker.arena.arena_path), worker.arena.arena_bytes) for worker in (prefill, decode)]

    reserved = (await decode.do(reserve(key(), "abc", 60))).hold
    assert await host.counts() == (4, 4, 0, 0)
    opened = (await prefill.do(pb.Operation(open=pb.Open(key=reserved.key)))).hold
    assert await host.counts() == (4, 0, 4, 0)
    for slot in opened.tables[0].slots:
        memories[0][slot * SLOT : (slot + 1) * SLOT] = bytes([slot + 1]) * SLOT
    await prefill.do(seal(opened.key, "abc"))
    filled = (await prefill.do(pb.Operation(fill=pb.Fill(key=opened.key, filled_tokens=50)))).hold
    adopted = (await decode.do(pb.Operation(adopt=pb.Adopt(key=filled.key)))).hold

    assert (adopted.key.generation, adopted.filled_tokens) == (3, 50)
    assert adopted.tables == reserved.tables
    for slot in adopted.tables[0].slots:
        assert memories[1][slot * SLOT : (slot + 1) * SLOT] == bytes([slot + 1]) * SLOT
    await decode.do(release(adopted.key))
    assert await host.counts() == (5, 0, 0, 3)

    again = (await decode.do(reserve(key("again"), "abcd"))).hold
    assert again.filled_tokens == 48
    assert again.tables[0].slots[:3] == reserved.tables[0].slots[:3]
    for memory in memories:
        memory.close()


async def test_a_failed_operation_does_not_stop_those_behind_it(host: Host) -> None:
    worker = await host.attach()
    results = await worker.batch(
        reserve(key("a"), tokens=16 * SLOTS),
        reserve(key("b"), tokens=16),
        reserve(key("c"), tokens=16 * SLOTS + 1),
        pb.Operation(extend=pb.Extend(key=key("b"), token_count=16)),
        pb.Operation(open=pb.Open(key=key("a"))),
        pb.Operation(extend=pb.Extend(key=key("a"), token_count=16)),
        release(key("a", generation=2)),
        reserve(key("b"), tokens=16),
    )
    assert [result.code for result in results] == [
        pb.CODE_OK,
        pb.CODE_EXHAUSTED,
        pb.CODE_INVALID,
        pb.CODE_UNKNOWN,
        pb.CODE_OK,
        pb.CODE_STALE,
        pb.CODE_OK,
        pb.CODE_OK,
    ]
    assert all(bool(result.message) == (result.code != pb.CODE_OK) for result in results)
    assert await host.counts() == (7, 1, 0, 0)


HELD = key("held")


@pytest.mark.parametrize(
    "operation",
    [
        pb.Operation(),
        pb.Operation(reserve=pb.Reserve()),
        pb.Operation(reserve=pb.Reserve(key=key(""), token_count=16)),
        pb.Operation(reserve=pb.Reserve(key=key("x" * 257), token_count=16)),
        pb.Operation(reserve=pb.Reserve(key=key(generation=(1 << 32) - 1), token_count=16)),
        pb.Operation(reserve=pb.Reserve(key=key(), hashes=[b"short"], token_count=16)),
        pb.Operation(reserve=pb.Reserve(key=key(), hashes=chain("ab"), token_count=16)),
        pb.Operation(reserve=pb.Reserve(key=key(), token_count=(1 << 32) - 1)),
        pb.Operation(open=pb.Open()),
        pb.Operation(fill=pb.Fill(key=HELD)),
        pb.Operation(adopt=pb.Adopt(key=HELD)),
        pb.Operation(extend=pb.Extend(key=HELD, token_count=(1 << 32) - 1)),
        pb.Operation(seal=pb.Seal(key=HELD, group=7)),
        pb.Operation(seal=pb.Seal(key=HELD, first_block=(1 << 32) - 1, hashes=chain("a"))),
        pb.Operation(seal=pb.Seal(key=HELD, hashes=[b""])),
        pb.Operation(seal=pb.Seal(key=HELD, hashes=[b"x" * 17])),
        pb.Operation(trim=pb.Trim(key=HELD)),
        pb.Operation(trim=pb.Trim(key=HELD, group=(1 << 32) - 1)),
        pb.Operation(release=pb.Release()),
        pb.Operation(renew=pb.Renew(keys=[Key()])),
    ],
    ids=lambda operation: str(operation)[:60].replace("\n", " "),
)
async def test_malformed_operations_change_nothing(host: Host, operation: pb.Operation) -> None:
    worker = await host.attach()
    await worker.do(reserve(HELD, tokens=32))
    before = await host.ledger()
    (result,) = await worker.batch(operation)
    assert result.code == pb.CODE_INVALID
    assert result.message
    assert await host.ledger() == before


async def test_a_batch_has_a_limit(host: Host) -> None:
    worker = await host.attach()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.batch(*[release(key())] * 4097)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_renewal_names_the_holds_that_are_lost(host: Host) -> None:
    worker = await host.attach()
    await worker.batch(reserve(key("a"), tokens=16), reserve(key("b"), tokens=16))
    host.now += LEASE - 1
    (result,) = await worker.batch(pb.Operation(renew=pb.Renew(keys=[key("gone"), key("a"), key("late"), key("b")])))
    assert result.code == pb.CODE_UNKNOWN
    assert "gone/1/1" in result.message
    assert list(result.lost) == [key("gone"), key("late")]
    host.now += LEASE - 1
    assert not (await worker.do(pb.Operation(renew=pb.Renew(keys=[key("a"), key("b")])))).lost


# ---- the end of workers and leases


async def test_a_session_ends_with_its_stream(host: Host) -> None:
    worker = await host.attach()
    await worker.leave()
    await host.attach()
    for session in (worker.arena.session, 0, 12345):
        with pytest.raises(grpc.aio.AioRpcError, match="attach again") as caught:
            await host.stub.Batch(pb.BatchRequest(session=session), timeout=10)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_killed_worker_gives_its_blocks_back(host: Host) -> None:
    survivor = await host.attach("survivor")
    await survivor.do(reserve(key("survivor"), tokens=16))
    code = (
        "import sys, time, grpc\n"
        "from paceline.proto import kvtransfer_pb2 as pb, kvtransfer_pb2_grpc, common_pb2\n"
        "stub = kvtransfer_pb2_grpc.KVTransferStub(grpc.insecure_channel(sys.argv[1]))\n"
        "layout = pb.KVLayout.FromString(bytes.fromhex(sys.argv[2]))\n"
        "stream = stub.Attach(pb.AttachRequest(worker_id='victim', layout=layout))\n"
        "session = next(stream).session\n"
        "key = common_pb2.Key(request_id='victim', attempt=1, generation=1)\n"
        "reserve = pb.Operation(reserve=pb.Reserve(key=key, token_count=48))\n"
        "stub.Batch(pb.BatchRequest(session=session, operations=[reserve]))\n"
        "time.sleep(60)\n"
    )
    shape = layout().SerializeToString().hex()
    victim = await asyncio.create_subprocess_exec(sys.executable, "-c", code, host.address, shape)
    try:
        reply = await host.until(lambda reply: reply.held == 4)
        assert {hold.owner for hold in reply.holds} == {"survivor", "victim"}
    finally:
        victim.send_signal(signal.SIGKILL)
        await asyncio.wait_for(victim.wait(), 20)
    await host.until(lambda reply: reply.in_flight == 3)  # the grace: a worker may live on without its stream
    host.now += 1
    reply = await host.until(lambda reply: reply.free == SLOTS - 1)
    assert [hold.key.request_id for hold in reply.holds] == ["survivor"]
    assert reply.expired_holds == 1


async def test_a_lease_that_nobody_renews_ends(host: Host) -> None:
    worker = await host.attach()
    await worker.do(reserve(key(), tokens=64))
    host.now += LEASE
    reply = await host.until(lambda reply: reply.free == SLOTS)
    assert (reply.expired_holds, len(reply.holds)) == (1, 0)


async def test_the_ledger_shows_who_has_what(host: Host) -> None:
    decode, prefill = await host.attach("decode-1"), await host.attach("prefill-1")
    await decode.do(reserve(key(), "ab", 48))
    host.now += 2
    await prefill.do(pb.Operation(open=pb.Open(key=key())))
    host.now += 1
    reply = await host.ledger()
    assert (reply.host_id, reply.balanced, reply.prefix_queries_tokens) == ("host-1", True, 32)
    assert list(reply.holds) == [
        pb.HoldInfo(
            key=key(generation=2),
            state="filling",
            owner="decode-1",
            writer="prefill-1",
            blocks=3,
            age_ms=3000,
            expires_in_ms=int(LEASE * 1000) - 1000,
        )
    ]


async def test_an_imbalance_is_loud(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    worker = await host.attach()
    await worker.do(reserve(key(), tokens=16))
    (hold,) = host.service._shaped.ledger.holds()  # type: ignore[union-attr]
    hold.tables[0].append(hold.tables[0][0])
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(20):
            while host.service.healthy:
                await asyncio.sleep(0.02)
    assert "OUT OF BALANCE" in caplog.text
    assert not (await host.ledger()).balanced
    assert not host.service.snapshot().healthy


async def test_stopping_ends_sessions_and_leaves_nothing(host: Host) -> None:
    worker = await host.attach()
    await worker.do(reserve(key(), tokens=16))
    await host.service.close()
    assert await worker.stream.code() is grpc.StatusCode.UNAVAILABLE
    assert list(host.folder.iterdir()) == []
    with pytest.raises(grpc.aio.AioRpcError, match="attach again"):
        await worker.batch(release(key()))
    late = host.stub.Attach(pb.AttachRequest(worker_id="late", layout=layout()), timeout=10)
    assert await late.code() is grpc.StatusCode.UNAVAILABLE
    assert list(host.folder.iterdir()) == []
