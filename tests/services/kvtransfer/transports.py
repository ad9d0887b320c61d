"""Every transport under one roof, for the conformance suite and its other process.

    python -m tests.services.kvtransfer.transports NAME SLOTS SLOT_BYTES

serves an arena filled by `content`, and prints the address and the offer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.rpc import RpcServer, mapped_errors
from paceline.services.common.secret import Secret
from paceline.services.kvtransfer.channels import Channels
from paceline.services.kvtransfer.grpc_transport import GrpcTransport
from paceline.services.kvtransfer.transport import ArenaMemory, Transport
from paceline.services.kvtransfer.ucx import UcxTransport
from paceline.services.kvtransfer.ucx_worker import load_ucx

SILENCE_SECONDS = 2.0

Serving = Callable[[ArenaMemory], AbstractAsyncContextManager[tuple[Transport, str]]]
"""Serves this memory: the transport, and the address where its gRPC server is, or would be."""


@contextlib.asynccontextmanager
async def ucx(memory: ArenaMemory) -> AsyncIterator[tuple[Transport, str]]:
    transport = UcxTransport(memory, SILENCE_SECONDS)
    try:
        yield transport, "127.0.0.1:1"
    finally:
        await transport.close()


class _Reads(pb_grpc.KVTransferServicer):
    """As much of the service as the transport needs."""

    def __init__(self, transport: GrpcTransport) -> None:
        self._transport = transport

    async def Read(self, request: pb.ReadRequest, context: Any) -> None:  # type: ignore[override]
        async with mapped_errors(context):
            await self._transport.send(request, context.write)


@contextlib.asynccontextmanager
async def grpc(memory: ArenaMemory) -> AsyncIterator[tuple[Transport, str]]:
    channels = Channels(Secret())
    transport = GrpcTransport(memory, channels, SILENCE_SECONDS)
    server = RpcServer("127.0.0.1", 0, Secret())
    pb_grpc.add_KVTransferServicer_to_server(_Reads(transport), server.server)
    address = f"127.0.0.1:{await server.start()}"
    try:
        yield transport, address
    finally:
        await transport.close()
        await channels.close()
        await server.close(0)


# A new transport is added here.
TRANSPORTS: dict[str, Serving] = {"ucx": ucx, "grpc": grpc}


def missing(name: str) -> str:
    """Why this transport cannot be tested here; empty where it can."""
    if name == "ucx":
        try:
            load_ucx()
        except ConfigError as error:
            return str(error)
    return ""


def content(slot: int, slot_bytes: int) -> np.ndarray:
    """What slot `slot` of the other process holds: eight bytes that no other slot has, again and again."""
    return np.full(slot_bytes // 8, (slot + 1) * 0x9E3779B97F4A7C15 % 2**64, np.uint64).view(np.uint8)


def arena(slots: int, slot_bytes: int) -> ArenaMemory:
    return ArenaMemory(memoryview(bytearray(slots * slot_bytes)), slot_bytes, slots)


async def _serve(name: str, slots: int, slot_bytes: int) -> None:
    memory = arena(slots, slot_bytes)
    for slot in range(slots):
        memory.slot(slot)[:] = content(slot, slot_bytes).data
    async with TRANSPORTS[name](memory) as (transport, address):
        print(json.dumps([address, transport.offer().hex()]), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
