"""A kvtransfer service that loses calls and answers, and the clients of two workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.kv_layout import GroupShape, make_layout
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import RpcServer
from paceline.services.kvtransfer.host_memory import HostOptions
from paceline.services.kvtransfer.host_socket import Reply
from paceline.services.kvtransfer.ledger.lease import Lease
from paceline.services.kvtransfer.service import KVTransferService
from paceline.services.worker.kv_client import KVClient

LAYOUT = make_layout((GroupShape("full", (0,), 1, 8),), 4, "test", encoding_size=16)
SLOTS = 8
LEASE = 0.6
KEY = Key("r", 1, 1)
CONTEXT = b"c" * 16


class Unreliable(KVTransferService):
    """A service that loses calls, or the answers to calls that it has carried out. The test sets its clock."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        memory = SLOTS * LAYOUT.slot_bytes
        super().__init__(HostOptions("host", memory, folder, LEASE, Credentials(), clock=lambda: self.now))
        self.loses_calls = 0
        self.loses_answers = 0
        self.forgets_results = 0
        self.pause = 0.0

    def serve(self, request: pb.BatchRequest, reply: Reply) -> None:
        if all(operation.HasField("renew") for operation in request.operations):
            super().serve(request, reply)
        elif self.loses_calls:
            self.loses_calls -= 1
            asyncio.get_running_loop().call_later(self.pause, reply.connection.abort)
        else:
            super().serve(request, _UnreliableReply(reply.connection, reply.request_id, self))


@dataclass(frozen=True)
class _UnreliableReply(Reply):
    service: Unreliable

    def __call__(self, reply: pb.BatchReply) -> None:
        asyncio.get_running_loop().call_later(self.service.pause, self._give, reply)

    def _give(self, reply: pb.BatchReply) -> None:
        if self.service.loses_answers:
            self.service.loses_answers -= 1
            self.connection.abort()
        elif self.service.forgets_results:
            self.service.forgets_results -= 1
            super().__call__(pb.BatchReply(results=reply.results[:-1]))
        else:
            super().__call__(reply)


class UnreliableHost:
    """An unreliable service with the clients of two workers."""

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

    def leases(self) -> list[Lease]:
        shaped = self.service.sessions.memory
        return shaped.ledger.leases() if shaped else []


@contextlib.asynccontextmanager
async def start_unreliable_host(folder: Path) -> AsyncIterator[UnreliableHost]:
    """Start an unreliable service, and attach the workers "decode" and "prefill"."""
    unreliable = Unreliable(folder)
    server = RpcServer("127.0.0.1", 0, Credentials())
    pb_grpc.add_KVTransferServicer_to_server(unreliable, server.server)
    await unreliable.start()
    address = f"127.0.0.1:{(port := await server.start())}"
    clients = [KVClient(address, role, role, Credentials()) for role in ("decode", "prefill")]
    for client in clients:
        await client.session.attach(LAYOUT, context_tokens=64)
    running = UnreliableHost(unreliable, server, port, *clients)
    yield running
    for client in clients:
        await client.session.close()
    await running.service.close()
    await running.server.close(0)
