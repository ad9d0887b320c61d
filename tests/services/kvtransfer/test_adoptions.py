"""A decode worker waits for its prompt, and gets the blocks with the operation that fills them."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from paceline.proto import kvtransfer_pb2 as pb
from tests.services.kvtransfer.kv_host import Host, Worker, key, release, reserve
from tests.services.kvtransfer.kv_toolkit import LEASE


async def begin(host: Host) -> tuple[Worker, Worker, pb.Hold]:
    """Both workers, and the hold that prefill writes."""
    decode, prefill = await host.attach("decode"), await host.attach("prefill")
    await decode.do(reserve(key(), "abc", 60))
    return decode, prefill, (await prefill.do(pb.Operation(open=pb.Open(key=key())))).hold


async def waiting(host: Host, decode: Worker) -> asyncio.Task[pb.Hold]:
    """A call that has come to where it waits."""
    memory = host.service.sessions.memory
    assert memory is not None
    call = asyncio.create_task(decode.adopt(key()))
    async with asyncio.timeout(5):
        while not memory.adoptions._waiting:
            await asyncio.sleep(0.001)
    return call


async def refused(call: asyncio.Task[pb.Hold]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


def fill(hold: pb.Hold) -> pb.Operation:
    return pb.Operation(fill=pb.Fill(key=hold.key, filled_tokens=50))


async def test_who_waits_gets_the_blocks_when_they_are_filled(host: Host) -> None:
    decode, prefill, opened = await begin(host)
    adopting = await waiting(host, decode)
    assert await host.counts() == (4, 0, 4, 0)
    await prefill.do(fill(opened))
    adopted = await adopting
    assert (adopted.key.generation, adopted.filled_tokens) == (3, 50)
    assert adopted.tables == opened.tables
    assert await host.counts() == (4, 4, 0, 0)
    await decode.do(release(adopted.key))
    assert (await host.counts())[1:3] == (0, 0)


async def test_who_gave_up_waiting_has_changed_nothing(host: Host) -> None:
    decode, prefill, opened = await begin(host)
    adopting = await waiting(host, decode)
    adopting.cancel()
    assert host.service.sessions.memory is not None
    async with asyncio.timeout(5):
        while host.service.sessions.memory.adoptions._waiting:
            await asyncio.sleep(0.001)
    await prefill.do(fill(opened))
    assert await host.counts() == (4, 0, 4, 0)
    assert (await decode.adopt(key())).key.generation == 3


async def test_the_end_of_a_reservation_is_the_end_of_waiting_for_it(host: Host) -> None:
    decode, prefill, opened = await begin(host)
    adopting = await waiting(host, decode)
    await decode.do(release(key()))
    assert await refused(adopting) is grpc.StatusCode.ABORTED
    await prefill.do(release(opened.key))
    assert (await host.counts())[1:3] == (0, 0)


async def test_the_end_of_a_lease_is_noticed_while_waiting(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.services.kvtransfer.adoptions.LOOK_SECONDS", 0.02)
    decode, _, _ = await begin(host)
    adopting = await waiting(host, decode)
    host.now += LEASE
    assert await refused(adopting) is grpc.StatusCode.ABORTED


async def test_only_who_reserved_may_wait_and_only_once(host: Host) -> None:
    decode, prefill, opened = await begin(host)
    assert await refused(asyncio.create_task(prefill.adopt(opened.key))) is grpc.StatusCode.ABORTED
    adopting = await waiting(host, decode)
    assert await refused(asyncio.create_task(decode.adopt(key()))) is grpc.StatusCode.ABORTED
    await prefill.do(fill(opened))
    adopted = await adopting
    assert await refused(asyncio.create_task(decode.adopt(adopted.key))) is grpc.StatusCode.ABORTED
    assert await host.counts() == (4, 4, 0, 0)
