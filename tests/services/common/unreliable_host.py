"""A kvtransfer that loses calls and answers, and two workers' sides of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from paceline.core.errors import UnavailableError
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.kv_client import KVClient
from paceline.services.common.rpc import RpcServer
from paceline.services.common.secret import Secret
from paceline.services.kvtransfer.hold import Hold
from paceline.services.kvtransfer.host_memory import HostOptions
from paceline.services.kvtransfer.host_socket import Answer
from paceline.services.kvtransfer.service import KVTransferService

LAYOUT = make_layout((GroupShape("full", (0,), 1, 8),), 4, "test")
SLOTS = 8
LEASE = 0.6
KEY = Key("r", 1, 1)
CONTEXT = b"c" * 16


class Unreliable(KVTransferService):
    """Loses calls, or the answers to calls that it has carried out. Its leases end when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        memory = SLOTS * LAYOUT.slot_bytes
        super().__init__(HostOptions("host", memory, folder, LEASE, Secret(), clock=lambda: self.now))
        self.loses_calls = 0
        self.loses_answers = 0
        self.forgets_results = 0
        self.pause = 0.0

    def serve(self, request: pb.BatchRequest) -> Answer:
        if all(operation.HasField("renew") for operation in request.operations):
            return super().serve(request)
        return self._serve_later(request)

    async def _serve_later(self, request: pb.BatchRequest) -> pb.BatchReply:
        if self.loses_calls:
            self.loses_calls -= 1
            await asyncio.sleep(self.pause)
            raise UnavailableError("the line broke")
        answer = super().serve(request)
        reply = answer if isinstance(answer, pb.BatchReply) else await answer
        await asyncio.sleep(self.pause)
        if self.loses_answers:
            self.loses_answers -= 1
            raise UnavailableError("the line broke")
        if self.forgets_results:
            self.forgets_results -= 1
            del reply.results[-1]
        return reply


class UnreliableHost:
    """The service and two workers."""

    def __init__(self, service: Unreliable, server: RpcServer, port: int, decode: KVClient, prefill: KVClient) -> None:
        self.service = service
        self.server = server
        self.port = port
        self.decode = decode
        self.prefill = prefill

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)

    async def all_free(self) -> None:
        await self.until(lambda: self.service.snapshot().counts.free == SLOTS)

    def holds(self) -> list[Hold]:
        shaped = self.service.sessions.memory
        return shaped.ledger.holds() if shaped else []


@contextlib.asynccontextmanager
async def start_unreliable_host(folder: Path) -> AsyncIterator[UnreliableHost]:
    """One whose workers "decode" and "prefill" are attached."""
    unreliable = Unreliable(folder)
    server = RpcServer("127.0.0.1", 0, Secret())
    pb_grpc.add_KVTransferServicer_to_server(unreliable, server.server)
    await unreliable.start()
    address = f"127.0.0.1:{(port := await server.start())}"
    clients = [KVClient(address, role, role, Secret()) for role in ("decode", "prefill")]
    for client in clients:
        await client.attach(LAYOUT, context_tokens=64)
    running = UnreliableHost(unreliable, server, port, *clients)
    yield running
    for client in clients:
        await client.close()
    await running.service.close()
    await running.server.close(0)
