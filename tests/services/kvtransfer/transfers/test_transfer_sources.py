"""Sources and transports that send nothing, or other blocks than the promised ones. No such block is handed off."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import RpcServer
from paceline.services.kvtransfer.transfers import fetches
from paceline.services.kvtransfer.transports.transport import ArenaMemory
from tests.services.kvtransfer.kv_host import SLOT, key, reserve
from tests.services.kvtransfer.kv_pair import TOKENS, Pair, Strange, failure, offering, pair


def shut_paths(two: Pair) -> list[tuple[str, str]]:
    memory = two.destination.service.sessions.memory
    assert memory is not None
    return list(memory.fetches._paths._avoided.now())


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
            assert shut_paths(two) == [("source", "damaging")]
            await two.end(reserved.key)
        else:
            assert (await failure(call)).code() is grpc.StatusCode.DATA_LOSS
            assert (await two.destination.ledger()).cached == 0
            assert not shut_paths(two)  # the source may have reused the blocks by then
            # If the reader has gone before the prompt is filled, the prefill worker must release its lease.
            await two.end(reserved.key, opened.key)


class Liar(pb_grpc.KVTransferServicer):
    """A source that answers what the test wants."""

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
    "a block twice": [OFFER, exported((0, 0)), exported(*((0, index) for index in range(7)), filled=TOKENS)],
    "a block is missing": [OFFER, exported(*((0, index) for index in range(6)), filled=TOKENS)],
    "more than was reserved": [OFFER, exported(*((0, index) for index in range(9)), filled=16 * 9 + 1)],
    "a name that is none": [OFFER, exported((0, 0), name=b"short")],
    "no path": [pb.ExportEvent(offer=pb.Offer()), exported((0, 0))],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_nonsense_of_a_source_fails_the_transfer_alone(tmp_path: Path, lie: list[pb.ExportEvent]) -> None:
    server = RpcServer("127.0.0.1", 0, Credentials())
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
    server = RpcServer("127.0.0.1", 0, Credentials())
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
        reserved = (await two.decode.do(reserve(key(request), tokens=20))).lease
        opened = (await two.prefill.do(reserve(key(request), tokens=20))).lease
        opened = (await two.prefill.do(pb.Operation(open=pb.Open(key=opened.key)))).lease
        await two.fill(opened, 20)
        assert (await two.fetch(reserved, opened)).path == "grpc"
        await two.end(reserved.key)

    async with pair(tmp_path, make_transports=transports) as two:
        offering(two.source, "broken", "grpc")
        await transfer(two, "first")
        await transfer(two, "second")
        assert made[0].reads == 1
        assert shut_paths(two) == [("source", "broken")]
        memory = two.destination.service.sessions.memory
        assert memory is not None
        until = memory.fetches._paths._avoided._until
        until.update(dict.fromkeys(until, 0.0))
        await transfer(two, "third")
        assert made[0].reads == 2
        # If all transports have failed recently, the last one is tried anyway.
        until["source", "grpc"] = math.inf
        await transfer(two, "fourth")
