"""A prompt that one host computes comes to another one, between two real services and over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.kv_layout import NO_SLOT
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.proto.common_pb2 import Key
from paceline.services.common.arena_map import map_arena
from paceline.services.common.rpc import RpcServer
from paceline.services.common.secret import Secret
from paceline.services.common.tasks import end_tasks
from paceline.services.kvtransfer import exports, fetches
from paceline.services.kvtransfer.fast_transports import fast_transports
from paceline.services.kvtransfer.operations import key_of
from paceline.services.kvtransfer.transport import ArenaMemory, Source
from tests.services.kvtransfer.kv_host import SLOT, Host, Worker, key, layout, release, reserve
from tests.services.kvtransfer.kv_toolkit import LEASE, chain
from tests.services.kvtransfer.transports import arena, missing

CONTEXT = "abcdef"
TOKENS = 16 * len(CONTEXT) + 5
"""Full blocks, and a part of one."""
SLOTS = 40


class Blocks:
    """A worker's view of the arena of its host."""

    def __init__(self, worker: Worker) -> None:
        arena = worker.arena
        self._memory: mmap.mmap = map_arena(Path(arena.arena_path), arena.arena_bytes)

    def write(self, slot: int, content: bytes) -> None:
        self._memory[slot * SLOT : (slot + 1) * SLOT] = content

    def read(self, slot: int) -> bytes:
        return self._memory[slot * SLOT : (slot + 1) * SLOT]


class Pair:
    """A host with a prefill worker, and one with a decode worker."""

    def __init__(self, source: Host, destination: Host, prefill: Worker, decode: Worker) -> None:
        self.source, self.destination = source, destination
        self.prefill, self.decode = prefill, decode
        self.there, self.here = Blocks(prefill), Blocks(decode)
        self.random = random.Random(7)
        self.contents: dict[tuple[int, int], bytes] = {}
        """By group and place in the table, what prefill has written."""

    async def begin(self, context: str = CONTEXT, tokens: int = TOKENS) -> tuple[pb.Hold, pb.Hold]:
        """The holds that decode reserves and prefill opens."""
        reserved = (await self.decode.do(reserve(key(), context, tokens + 32))).hold
        there = (await self.prefill.do(reserve(key(), context, tokens))).hold
        opened = (await self.prefill.do(pb.Operation(open=pb.Open(key=there.key)))).hold
        return reserved, opened

    def fetch(self, reserved: pb.Hold, opened: pb.Hold) -> grpc.aio.UnaryUnaryCall:
        session = self.decode.arena.session
        request = pb.FetchRequest(session=session, key=reserved.key, source=self.source.address, source_key=opened.key)
        return self.destination.stub.Fetch(request, timeout=30)

    async def compute(self, hold: pb.Hold, first: int, last: int, group: int = 0, context: str = CONTEXT) -> None:
        """Prefill writes blocks [first, last) of a group, and seals those that are full."""
        for index in range(first, last):
            content = self.contents[group, index] = self.random.randbytes(SLOT)
            self.there.write(hold.tables[group].slots[index], content)
        if full := chain(context)[first:last]:
            await self.prefill.do(pb.Operation(seal=pb.Seal(key=hold.key, group=group, first_block=first, hashes=full)))

    async def fill(self, hold: pb.Hold, tokens: int = TOKENS) -> None:
        await self.prefill.do(pb.Operation(fill=pb.Fill(key=hold.key, filled_tokens=tokens)))

    def check(self, hold: pb.Hold, first: int, last: int, group: int = 0) -> None:
        """What prefill has written is here."""
        for index in range(first, last):
            assert self.here.read(hold.tables[group].slots[index]) == self.contents[group, index]

    async def end(self, here: Key | None = None, there: Key | None = None) -> None:
        """The workers let go of what is left; then no host holds anything."""
        for worker, of in ((self.decode, here), (self.prefill, there)):
            if of is not None:
                await worker.do(release(of))
        for host in (self.source, self.destination):
            reply = await host.until(lambda reply: not (reply.held or reply.in_flight or reply.holds))
            assert reply.balanced


@contextlib.asynccontextmanager
async def pair(
    folder: Path, shape: pb.KVLayout | None = None, alike: bool = False, **options: object
) -> AsyncIterator[Pair]:
    """Two hosts; the options are those of the destination's service, or of both."""
    async with contextlib.AsyncExitStack() as undo:
        hosts = []
        for name, own in (("source", options if alike else {}), ("destination", options)):
            (folder / name).mkdir()
            host = Host(folder / name, SLOTS * SLOT, name=name, **own)  # type: ignore[arg-type]
            await host.start()
            undo.push_async_callback(host.close)
            hosts.append(host)
        workers = [await host.attach(shape=shape) for host in hosts]
        yield Pair(hosts[0], hosts[1], workers[0], workers[1])


class Strange:
    """A transport that is of no use."""

    def __init__(self, memory: ArenaMemory, name: str, broken: bool = False) -> None:
        self.name = name
        self.reads = 0
        self._memory = memory
        self._broken = broken

    def offer(self) -> bytes:
        return b""

    async def read(self, source: Source, slots: Sequence[tuple[int, int]]) -> None:
        self.reads += 1
        if self._broken:
            raise UnavailableError("it is broken")
        for _, here in slots:
            self._memory.slot(here)[:] = b"?" * SLOT

    async def close(self) -> None:
        pass


def offering(host: Host, *names: str) -> None:
    """The source says that it can be read by these transports alone."""
    memory = host.service.sessions.memory
    assert memory is not None
    kept = memory.exports._offer.transports.get("grpc", b"")
    memory.exports._offer.transports.clear()
    for name in names:
        memory.exports._offer.transports[name] = kept if name == "grpc" else b""


async def failure(call: grpc.aio.UnaryUnaryCall) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_blocks_come_while_the_others_are_computed(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.compute(opened, 0, 4)
        async with asyncio.timeout(10):
            while two.here.read(reserved.tables[0].slots[3]) != two.contents[0, 3]:
                await asyncio.sleep(0.01)
        assert not call.done()
        await two.compute(opened, 4, 7)
        await two.fill(opened)
        reply = await call
        assert (reply.blocks, reply.bytes, reply.path) == (7, 7 * SLOT, "grpc")
        two.check(reserved, 0, 7)
        # It is what a prefill worker of the same host would have left.
        adopted = (await two.decode.do(pb.Operation(adopt=pb.Adopt(key=reply.key)))).hold
        assert adopted.filled_tokens == TOKENS
        assert adopted.tables[0].slots[:9] == reserved.tables[0].slots[:9]
        await two.end(adopted.key)
        for worker in (two.decode, two.prefill):
            again = (await worker.do(reserve(key("again"), CONTEXT))).hold
            assert again.filled_tokens == 16 * 5  # one fewer than there are, because something must be computed
            await worker.do(release(again.key))


@pytest.mark.skipif(bool(missing("ucx")), reason=missing("ucx") or "UCX is there")
async def test_blocks_come_over_ucx_where_both_have_it(tmp_path: Path) -> None:
    async with pair(tmp_path, alike=True, make_transports=await fast_transports("ucx", only_here=True)) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.compute(opened, 0, 7)
        await two.fill(opened)
        assert (await call).path == "ucx"
        two.check(reserved, 0, 7)
        await two.end(reserved.key)


async def test_ucx_is_opened_only_where_others_come(tmp_path: Path) -> None:
    for wanted, only_here in (("grpc", False), ("auto", True)):
        assert not (await fast_transports(wanted, only_here))(arena(1, SLOT))
    if missing("ucx"):
        assert not (await fast_transports("auto", only_here=False))(arena(1, SLOT))
        with pytest.raises(ConfigError, match=r"paceline\[ucx\]"):
            await fast_transports("ucx", only_here=False)


async def test_what_is_here_already_is_not_brought_again(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        await two.compute(opened, 0, 7)
        await two.fill(opened)
        reply = await two.fetch(reserved, opened)
        await two.end(reserved.key)
        longer = CONTEXT + "g"
        reserved = (await two.decode.do(reserve(key("second"), longer, 16 * 7 + 1))).hold
        assert reserved.filled_tokens == 16 * 6
        opened = (await two.prefill.do(reserve(key("second"), longer, 16 * 7 + 1))).hold
        opened = (await two.prefill.do(pb.Operation(open=pb.Open(key=opened.key)))).hold
        await two.compute(opened, 6, 8, context=longer)
        await two.fill(opened, 16 * 7 + 1)
        reply = await two.fetch(reserved, opened)
        assert reply.blocks == 2
        two.check(reserved, 6, 8)
        await two.end(reserved.key)


async def test_a_transfer_of_no_block_is_a_transfer(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin("", tokens=3)
        await two.fill(opened, 0)
        reply = await two.fetch(reserved, opened)
        assert (reply.blocks, reply.path) == (0, "")
        adopted = (await two.decode.do(pb.Operation(adopt=pb.Adopt(key=reply.key)))).hold
        assert adopted.filled_tokens == 0
        await two.end(adopted.key)


async def test_of_a_window_only_what_is_still_seen_is_brought(tmp_path: Path) -> None:
    # Two groups: full attention in blocks of 32 tokens, and a window of 20 tokens in blocks of 16.
    shape = layout(groups=((32, 0), (16, 20)))
    async with pair(tmp_path, shape) as two:
        reserved, opened = await two.begin(CONTEXT, 16 * 6)
        call = two.fetch(reserved, opened)
        for index in range(3):
            two.contents[0, index] = bytes([index]) * SLOT
            two.there.write(opened.tables[0].slots[index], two.contents[0, index])
        await two.compute(opened, 0, 6, group=1)
        trim = pb.Trim(key=opened.key, group=1, first_kept_block=4)
        await two.prefill.do(pb.Operation(trim=trim))
        await two.fill(opened, 16 * 6)
        reply = await call
        # A query at 96 sees from 77 on: of the window's blocks the last two.
        assert reply.blocks == 3 + 2
        two.check(reserved, 0, 3, group=0)
        two.check(reserved, 4, 6, group=1)
        assert NO_SLOT not in reserved.tables[1].slots
        await two.end(reserved.key)


async def test_a_reader_that_is_slower_than_a_lease_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "ALIVE_SECONDS", 0.02)
    go_on = asyncio.Event()
    written: list[pb.ExportEvent] = []

    async def write(event: pb.ExportEvent) -> None:
        if event.HasField("exported"):
            await go_on.wait()
        written.append(event)

    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        memory = two.source.service.sessions.memory
        assert memory is not None
        run = asyncio.create_task(memory.exports.run(key_of(opened.key), 0, write))
        await two.compute(opened, 0, 7)
        await two.fill(opened)  # from now on its worker does not renew
        for _ in range(4):
            await two.source.until(lambda reply: any(hold.state == "active" for hold in reply.holds))
            await asyncio.sleep(0.1)
            two.source.now += LEASE / 2
        go_on.set()
        async with asyncio.timeout(10):
            while not written[-1].exported.HasField("filled_tokens"):
                await asyncio.sleep(0.01)
        assert sum(len(event.exported.blocks) for event in written) == 7
        await end_tasks(run)
        await two.end(reserved.key)


async def test_a_cancelled_transfer_gives_everything_back(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.compute(opened, 0, 4)
        await two.destination.until(lambda reply: any(hold.writer == "kvtransfer" for hold in reply.holds))
        call.cancel()
        await two.end(reserved.key, opened.key)
        assert two.destination.service.snapshot().transfers["transfer_failures"] == 0


async def test_blocks_of_a_dead_decode_worker_stay_until_nothing_writes_to_them(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.destination.until(lambda reply: any(hold.writer == "kvtransfer" for hold in reply.holds))
        await two.decode.leave()
        reply = await two.destination.until(lambda reply: any(hold.state == "draining" for hold in reply.holds))
        assert reply.in_flight == len(reserved.tables[0].slots)
        call.cancel()  # as its connection would have been
        await two.end(there=opened.key)


async def test_the_death_of_the_prefill_worker_ends_the_transfer(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.compute(opened, 0, 4)
        await two.prefill.leave()
        error = await failure(call)
        assert error.code() is grpc.StatusCode.DATA_LOSS
        assert two.source.address in str(error.details())
        two.source.now += 10
        await two.end(reserved.key)


async def test_the_end_of_the_reservation_ends_the_transfer(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.destination.until(lambda reply: any(hold.writer == "kvtransfer" for hold in reply.holds))
        await two.decode.do(release(reserved.key))
        await two.compute(opened, 0, 7)
        await two.fill(opened)
        assert (await failure(call)).code() is grpc.StatusCode.DATA_LOSS
        await two.end()


async def test_the_service_of_a_source_that_is_gone_is_a_failed_transfer(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.compute(opened, 0, 4)
        await two.source.server.close(0)
        assert (await failure(call)).code() is grpc.StatusCode.DATA_LOSS
        assert (await failure(two.fetch(reserved, opened))).code() is grpc.StatusCode.ABORTED  # the hold has ended
        await two.decode.do(release(reserved.key))
        await two.destination.until(lambda reply: not (reply.held or reply.in_flight or reply.holds))


@pytest.mark.parametrize("fallback", [True, False])
async def test_damaged_blocks_are_never_handed_over(tmp_path: Path, fallback: bool) -> None:
    def transports(memory: ArenaMemory) -> list[Strange]:
        return [Strange(memory, "damaging")]

    async with pair(tmp_path, make_transports=transports) as two:
        offering(two.source, "damaging", *(("grpc",) if fallback else ()))
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.compute(opened, 0, 7)
        await two.fill(opened)
        if fallback:
            assert (await call).path == "grpc"
            two.check(reserved, 0, 7)
            await two.end(reserved.key)
        else:
            assert (await failure(call)).code() is grpc.StatusCode.DATA_LOSS
            assert (await two.destination.ledger()).cached == 0
            await two.end(reserved.key)


async def test_only_its_own_workers_hold_is_filled(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        stranger = await two.destination.attach("stranger")
        own, two.decode = two.decode, stranger
        assert (await failure(two.fetch(reserved, opened))).code() is grpc.StatusCode.ABORTED
        two.decode = own
        unknown = pb.Hold(key=key("unknown"))
        assert (await failure(two.fetch(unknown, opened))).code() is grpc.StatusCode.ABORTED
        two.decode.arena.session += 2
        assert (await failure(two.fetch(reserved, opened))).code() is grpc.StatusCode.FAILED_PRECONDITION
        two.decode.arena.session -= 2
        await two.end(reserved.key, opened.key)


async def test_a_source_tells_nobody_of_what_is_not_theirs(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        stub = two.source.stub

        async def refused(request: pb.ExportRequest | pb.ReadRequest) -> grpc.StatusCode:
            call = stub.Export(request) if isinstance(request, pb.ExportRequest) else stub.Read(request)
            async with asyncio.timeout(10):
                while (event := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    assert not isinstance(event, pb.ReadReply)
            return await call.code()

        def export(of: Key, fingerprint: str = "model-a", cached: int = 0) -> pb.ExportRequest:
            return pb.ExportRequest(fingerprint=fingerprint, key=of, cached_tokens=cached)

        first = stub.Export(export(opened.key))
        token = (await first.read()).offer.transports["grpc"][-16:]
        for request, code in (
            (export(opened.key), grpc.StatusCode.INVALID_ARGUMENT),  # it has a reader
            (export(opened.key, "model-b"), grpc.StatusCode.FAILED_PRECONDITION),
            (export(key("unknown")), grpc.StatusCode.ABORTED),
            (export(opened.key, cached=8), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.ReadRequest(token=b"guess", slots=[0]), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.ReadRequest(token=token, slots=[SLOTS]), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused(request)
            assert caught.value.code() is code
        first.cancel()
        await two.end(reserved.key, opened.key)


class Liar(pb_grpc.KVTransferServicer):
    """A source that says what a test wants."""

    def __init__(self, events: Sequence[pb.ExportEvent], then_silent: bool = False) -> None:
        self._events, self._then_silent = events, then_silent

    async def Export(
        self, request: pb.ExportRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ExportEvent]:
        for event in self._events:
            yield event
        if self._then_silent:
            await asyncio.Event().wait()

    async def Read(self, request: pb.ReadRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.ReadReply]:
        for _ in request.slots:
            yield pb.ReadReply(data=bytes(SLOT))


def exported(*places: tuple[int, int], filled: int | None = None, name: bytes = b"") -> pb.ExportEvent:
    zeros = fetches.digest_of(memoryview(bytes(SLOT)))
    blocks = [pb.ExportedBlock(group=group, index=index, digest=zeros, hash=name) for group, index in places]
    return pb.ExportEvent(exported=pb.Exported(blocks=blocks, filled_tokens=filled))


OFFER = pb.ExportEvent(offer=pb.Offer(host_id="liar", transports={"grpc": SLOT.to_bytes(8) + bytes(16)}))
LIES = {
    "nothing": [],
    "no offer": [exported(filled=0)],
    "two offers": [OFFER, OFFER],
    "an end without an end": [OFFER, exported((0, 0))],
    "a block of no group": [OFFER, exported((1, 0))],
    "a block behind the table": [OFFER, exported((0, 99))],
    "a block twice": [OFFER, exported((0, 0)), exported((0, 0))],
    "a block is missing": [OFFER, exported(*((0, index) for index in range(6)), filled=TOKENS)],
    "more than was reserved": [OFFER, exported(*((0, index) for index in range(9)), filled=16 * 9 + 1)],
    "a name that is none": [OFFER, exported((0, 0), name=b"short")],
    "no path": [pb.ExportEvent(offer=pb.Offer()), exported((0, 0))],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_nonsense_of_a_source_fails_the_transfer_alone(tmp_path: Path, lie: list[pb.ExportEvent]) -> None:
    server = RpcServer("127.0.0.1", 0, Secret())
    pb_grpc.add_KVTransferServicer_to_server(Liar(lie), server.server)
    address = f"127.0.0.1:{await server.start()}"
    try:
        async with pair(tmp_path) as two:
            reserved, opened = await two.begin()
            two.source.address = address
            assert (await failure(two.fetch(reserved, opened))).code() is grpc.StatusCode.DATA_LOSS
            await two.end(reserved.key, opened.key)
    finally:
        await server.close(0)


async def test_a_silent_source_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "SILENCE_SECONDS", 0.2)
    server = RpcServer("127.0.0.1", 0, Secret())
    pb_grpc.add_KVTransferServicer_to_server(Liar([OFFER, exported((0, 0))], then_silent=True), server.server)
    address = f"127.0.0.1:{await server.start()}"
    try:
        async with pair(tmp_path) as two:
            reserved, opened = await two.begin()
            two.source.address = address
            error = await failure(two.fetch(reserved, opened))
            assert "silent" in str(error.details())
            await two.end(reserved.key, opened.key)
    finally:
        await server.close(0)


async def test_a_path_that_failed_is_left_out_for_a_while_and_tried_again(tmp_path: Path) -> None:
    made: list[Strange] = []

    def transports(memory: ArenaMemory) -> list[Strange]:
        made.append(Strange(memory, "broken", broken=True))
        return made

    async def transfer(two: Pair, request: str) -> None:
        reserved = (await two.decode.do(reserve(key(request), tokens=20))).hold
        opened = (await two.prefill.do(reserve(key(request), tokens=20))).hold
        opened = (await two.prefill.do(pb.Operation(open=pb.Open(key=opened.key)))).hold
        await two.fill(opened, 20)
        assert (await two.fetch(reserved, opened)).path == "grpc"
        await two.end(reserved.key)

    async with pair(tmp_path, make_transports=transports) as two:
        offering(two.source, "broken", "grpc")
        await transfer(two, "first")
        await transfer(two, "second")
        assert made[0].reads == 1
        memory = two.destination.service.sessions.memory
        assert memory is not None
        shut = memory.fetches._paths._shut
        assert list(shut) == [("source", "broken")]
        shut.update(dict.fromkeys(shut, 0.0))
        await transfer(two, "third")
        assert made[0].reads == 2
