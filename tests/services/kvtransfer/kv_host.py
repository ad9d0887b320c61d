"""A kvtransfer service over a real gRPC server and a real arena, with workers that attach to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.proto.common_pb2 import Key
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import RpcServer, open_channel
from paceline.services.kvtransfer.host_memory import HostOptions
from paceline.services.kvtransfer.service import KVTransferService
from paceline.services.worker.batch_sender import HostConnection
from tests.services.kvtransfer.kv_toolkit import LEASE, chain

SLOT = 4096
SLOTS = 8


def layout(slot_bytes: int = SLOT, groups: tuple[tuple[int, int], ...] = ((16, 0),), **fields: object) -> pb.KVLayout:
    made = [pb.KVGroup(name=f"g{i}", block_tokens=tokens, window=window) for i, (tokens, window) in enumerate(groups)]
    values = {"fingerprint": "model-a", "base_tokens": 16, **fields}
    return pb.KVLayout(slot_bytes=slot_bytes, groups=made, **values)  # type: ignore[arg-type]


async def batch(socket_path: str, request: pb.BatchRequest) -> pb.BatchReply:
    """Send one batch on a connection of its own. Raises UnavailableError if the host does not take it."""
    connection = await HostConnection.connect(socket_path)
    try:
        async with asyncio.timeout(10):
            return await connection.call(request)
    finally:
        connection.close()


class Worker:
    """A worker that is attached to a host."""

    def __init__(self, stream: grpc.aio.UnaryStreamCall, arena: pb.AttachEvent):
        self.stream = stream
        self.arena = arena

    async def batch(self, *operations: pb.Operation) -> list[pb.Result]:
        request = pb.BatchRequest(session=self.arena.session, operations=operations)
        return list((await batch(self.arena.socket_path, request)).results)

    async def do(self, operation: pb.Operation) -> pb.Result:
        """Run one operation, which must succeed, and return its result."""
        (result,) = await self.batch(operation)
        assert result.code == pb.CODE_OK, result.message
        return result

    async def adopt(self, key: Key) -> pb.Adoption:
        """Wait until the lease is filled, and adopt it."""
        return (await self.do(pb.Operation(adopt=pb.Adopt(key=key)))).adoption

    async def leave(self) -> None:
        self.stream.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.stream.code()


class Host:
    """A host's kvtransfer service with its address and its clock."""

    def __init__(
        self,
        folder: Path,
        kv_memory: int = SLOTS * SLOT,
        clock: Callable[[], float] | None = None,
        name: str = "host-1",
        **options: Any,
    ) -> None:
        self.now = 1000.0
        self.folder = folder
        clock = clock or (lambda: self.now)
        self.service = KVTransferService(
            HostOptions(name, kv_memory, folder, LEASE, Credentials(), clock=clock, **options)
        )
        self.server = RpcServer("127.0.0.1", 0, Credentials())
        pb_grpc.add_KVTransferServicer_to_server(self.service, self.server.server)

    async def start(self) -> None:
        await self.service.start()
        self.address = f"127.0.0.1:{await self.server.start()}"
        self.channel = open_channel(self.address, Credentials())
        self.stub: pb_grpc.KVTransferAsyncStub = pb_grpc.KVTransferStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()
        await self.service.close()
        await self.server.close(0)

    async def attach(self, worker_id: str = "w", shape: pb.KVLayout | None = None, context_tokens: int = 0) -> Worker:
        request = pb.AttachRequest(
            worker_id=worker_id, role="decode", layout=shape or layout(), context_tokens=context_tokens
        )
        stream = self.stub.Attach(request)
        async with asyncio.timeout(10):
            arena = await stream.read()
        if not isinstance(arena, pb.AttachEvent):
            raise AssertionError(f"refused: {await stream.details()}")
        return Worker(stream, arena)

    async def ledger(self) -> pb.LedgerReply:
        reply = await self.stub.Ledger(pb.LedgerRequest(with_leases=True), timeout=10)
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


def key(request: str = "r", attempt: int = 1, generation: int = 1) -> Key:
    return Key(request_id=request, attempt=attempt, generation=generation)


def reserve(of: Key, context: str = "", tokens: int | None = None) -> pb.Operation:
    tokens = len(context) * 16 if tokens is None else tokens
    return pb.Operation(
        reserve=pb.Reserve(key=of, hashes=chain(context), token_count=tokens, max_cached_tokens=max(0, tokens - 1))
    )


def seal(of: Key, context: str, group: int = 0, first: int = 0) -> pb.Operation:
    """Return an operation that seals blocks of 16 tokens, from block `first` to the end of the context."""
    return pb.Operation(seal=pb.Seal(key=of, group=group, first_block=first, hashes=chain(context)[first:]))


def release(of: Key) -> pb.Operation:
    return pb.Operation(release=pb.Release(key=of))
