"""Transfers that end early, and callers without a right to blocks: leases end, and nobody gets another's blocks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto.common_pb2 import Key
from tests.services.kvtransfer.kv_host import key, release
from tests.services.kvtransfer.kv_pair import SLOTS, failure, pair


async def test_a_cancelled_transfer_gives_everything_back(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.compute(opened, 0, 4)
        await two.destination.until(lambda reply: any(lease.writer == "kvtransfer" for lease in reply.leases))
        call.cancel()
        await two.end(reserved.key, opened.key)
        assert two.destination.service.snapshot().transfers.failures == 0


async def test_blocks_of_a_dead_decode_worker_stay_until_nothing_writes_to_them(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.destination.until(lambda reply: any(lease.writer == "kvtransfer" for lease in reply.leases))
        await two.decode.leave()
        reply = await two.destination.until(lambda reply: any(lease.state == "draining" for lease in reply.leases))
        assert reply.in_flight == len(reserved.tables[0].slots)
        call.cancel()  # as the end of its connection would do
        await two.end(there=opened.key)


@pytest.mark.slow
async def test_the_death_of_the_prefill_worker_ends_the_transfer(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.compute(opened, 0, 4)
        await two.prefill.leave()
        error = await failure(call)
        assert error.code() is grpc.StatusCode.DATA_LOSS
        assert two.source.address in str(error.details())
        assert two.destination.service.snapshot().transfers.failures == 1
        two.source.now += 10
        await two.end(reserved.key)


async def test_the_end_of_the_reservation_ends_the_transfer(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.destination.until(lambda reply: any(lease.writer == "kvtransfer" for lease in reply.leases))
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
        assert (await failure(two.fetch(reserved, opened))).code() is grpc.StatusCode.ABORTED  # the lease is over
        await two.decode.do(release(reserved.key))
        await two.destination.until(lambda reply: not (reply.held or reply.in_flight or reply.leases))


async def test_only_its_own_workers_hold_is_filled(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        stranger = await two.destination.attach("stranger")
        own, two.decode = two.decode, stranger
        assert (await failure(two.fetch(reserved, opened))).code() is grpc.StatusCode.ABORTED
        two.decode = own
        unknown = pb.Lease(key=key("unknown"))
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
            (export(opened.key), grpc.StatusCode.INVALID_ARGUMENT),  # it has a reader already
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

        async def another() -> bool:
            call = stub.Export(export(opened.key))
            try:
                return bool((await call.read()).HasField("offer"))
            except grpc.aio.AioRpcError:
                return False
            finally:
                call.cancel()

        async with asyncio.timeout(10):
            while not await another():
                await asyncio.sleep(0.01)
        await two.end(reserved.key, opened.key)
