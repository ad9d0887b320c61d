"""All transports by name, for the conformance suite and its other process.

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

import numpy as np

from paceline.core.errors import ConfigError
from paceline.services.kvtransfer.transports.grpc_transport import serving_alone
from paceline.services.kvtransfer.transports.transport import ArenaMemory, Transport
from paceline.services.kvtransfer.transports.ucx import UcxTransport
from paceline.services.kvtransfer.transports.ucx_worker import load_ucx

SILENCE_SECONDS = 1.0

Serving = Callable[[ArenaMemory], AbstractAsyncContextManager[tuple[Transport, str]]]
"""A context manager that serves a memory. It gives the transport and the gRPC address, at which UCX has no server."""


@contextlib.asynccontextmanager
async def ucx(memory: ArenaMemory) -> AsyncIterator[tuple[Transport, str]]:
    transport = UcxTransport(memory, SILENCE_SECONDS)
    try:
        yield transport, "127.0.0.1:1"
    finally:
        await transport.close()


def grpc(memory: ArenaMemory) -> AbstractAsyncContextManager[tuple[Transport, str]]:
    return serving_alone(memory, SILENCE_SECONDS)


# Add new transports here.
TRANSPORTS: dict[str, Serving] = {"ucx": ucx, "grpc": grpc}


def missing(name: str) -> str:
    """Return why this transport cannot be tested here; empty if it can."""
    if name == "ucx":
        try:
            load_ucx()
        except ConfigError as error:
            return str(error)
    return ""


def content(slot: int, slot_bytes: int) -> np.ndarray:
    """Return the content of slot `slot` of the other process: eight bytes, repeated. Each slot has other bytes."""
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
