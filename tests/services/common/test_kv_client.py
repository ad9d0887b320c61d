"""A worker's side of kvtransfer against the real service, when answers are late, lost or never come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paceline.core.errors import InvalidRequestError, PacelineError, UnavailableError
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.kv_client import KVClient
from paceline.services.common.rpc import RpcServer
from paceline.services.kvtransfer.service import Context, KVTransferService

LAYOUT = make_layout((GroupShape("full", (0,), 1, 8),), 4, "test")
SLOTS = 8
KEY = Key("r", 1, 1)


class Forgetful(KVTransferService):
    """Carries out batches, and loses the answers to some of them."""

    forgets = 0
    pause = 0.0

    async def Batch(self, request: pb.BatchRequest, context: Context) -> pb.BatchReply:
        reply = await super().Batch(request, context)
        await asyncio.sleep(self.pause)
        if self.forgets:
            self.forgets -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the line broke")
        return reply


class Host:
    def __init__(self, service: Forgetful, clients: list[KVClient]) -> None:
        self.service = service
        self.decode, self.prefill = clients

    async def all_free(self) -> None:
        async with asyncio.timeout(10):
            while self.service.snapshot().counts.free != SLOTS:
                await asyncio.sleep(0.01)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    service = Forgetful("host", SLOTS * LAYOUT.slot_bytes, tmp_path, lease_seconds=60)
    server = RpcServer("127.0.0.1", 0)
    pb_grpc.add_KVTransferServicer_to_server(service, server.server)
    await service.start()
    address = f"127.0.0.1:{await server.start()}"
    clients = [KVClient(address, role, role) for role in ("decode", "prefill")]
    for client in clients:
        await client.attach(LAYOUT)
    yield Host(service, clients)
    for client in clients:
        await client.close()
    await service.close()
    await server.close(0)


async def test_what_was_reserved_without_an_answer_is_given_back(host: Host) -> None:
    host.service.forgets = 1
    with pytest.raises(UnavailableError, match="the line broke"):
        await host.decode.reserve(KEY, [], 64, 0)
    await host.all_free()


async def test_a_release_is_repeated_until_it_is_answered(host: Host) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    host.service.forgets = 3
    host.decode.release(KEY)
    async with asyncio.timeout(10):
        while host.service.forgets:
            await asyncio.sleep(0.01)
    await host.all_free()


async def test_a_writer_that_never_heard_that_it_is_one_lets_go(host: Host) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    host.service.forgets = 1
    with pytest.raises(UnavailableError):
        await host.prefill.open(KEY)
    host.decode.release(KEY)
    await host.all_free()


async def test_what_comes_after_its_caller_has_gone_is_given_back(host: Host) -> None:
    host.service.pause = 0.2
    task = asyncio.create_task(host.decode.reserve(KEY, [], 64, 0))
    async with asyncio.timeout(10):
        while host.service.snapshot().counts.held == 0:
            await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await host.all_free()


async def test_what_kvtransfer_refuses_is_not_the_client_s_fault(host: Host) -> None:
    with pytest.raises(PacelineError, match="kvtransfer refused an operation") as refused:
        await host.decode.reserve(KEY, [], 16 * (SLOTS + 1), 0)
    assert not isinstance(refused.value, InvalidRequestError)
