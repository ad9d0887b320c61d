"""The processes of `bench.transfer.transport`: the two sides of each way to move blocks.

    python -m bench.transfer.transport_ways source WAY BLOCK_BYTES BLOCKS
    python -m bench.transfer.transport_ways reader WAY BLOCK_BYTES BLOCKS IP OFFER

A source prints its offer. A reader prints "ready". For each line on its standard input it then reads all blocks once
and prints the wall seconds and CPU seconds of this read.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
import numpy as np

from paceline.services.kvtransfer.transports.transport import ArenaMemory, Source
from paceline.services.kvtransfer.transports.ucx import UcxTransport

PIECE_BYTES = 1 << 20
"""Size of one message of a gRPC stream."""
READERS: dict[str, str] = {"memcpy": "", "tcp": "", "grpc": "", "ucx": "ucxx", "nixl": "nixl_cu12"}
"""The package that each way needs, by way; empty if it needs none."""

Read = Callable[[], Awaitable[None]]


def arena(block_bytes: int, blocks: int) -> ArenaMemory:
    return ArenaMemory(memoryview(bytearray(block_bytes * blocks)), block_bytes, blocks)


def content(memory: ArenaMemory) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, len(memory.blocks), np.uint8)


async def serve_memcpy(memory: ArenaMemory) -> str:
    return "-"


async def serve_tcp(memory: ArenaMemory) -> str:
    listening = socket.create_server(("", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        while connection.recv(1):
            connection.sendall(memory.blocks)

    threading.Thread(target=serve, daemon=True).start()
    return str(listening.getsockname()[1])


async def serve_grpc(memory: ArenaMemory) -> str:
    async def read(request: bytes, context: object) -> AsyncIterator[bytes]:
        for at in range(0, len(memory.blocks), PIECE_BYTES):
            yield bytes(memory.blocks[at : at + PIECE_BYTES])

    server = grpc.aio.server()
    handlers = {"Read": grpc.unary_stream_rpc_method_handler(read)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Blocks", handlers),))
    port = server.add_insecure_port("0.0.0.0:0")
    await server.start()
    _kept.append(server)
    return str(port)


async def serve_ucx(memory: ArenaMemory) -> str:
    transport = UcxTransport(memory)
    _kept.append(transport)
    return transport.offer().hex()


async def serve_nixl(memory: ArenaMemory) -> str:
    agent, address = _nixl(memory, "source")
    _kept.append(agent)
    return json.dumps([agent.get_agent_metadata().hex(), address]).replace(" ", "")


async def read_memcpy(memory: ArenaMemory, ip: str, offer: str) -> Read:
    original = memoryview(content(memory))

    async def read() -> None:
        memory.blocks[:] = original

    return read


async def read_tcp(memory: ArenaMemory, ip: str, offer: str) -> Read:
    connection = socket.create_connection((ip, int(offer)))

    async def read() -> None:
        connection.sendall(b"g")
        got = 0
        while got < len(memory.blocks):
            got += connection.recv_into(memory.blocks[got:])

    return read


async def read_grpc(memory: ArenaMemory, ip: str, offer: str) -> Read:
    channel = grpc.aio.insecure_channel(f"{ip}:{offer}")

    async def read() -> None:
        at = 0
        async for piece in channel.unary_stream("/bench.Blocks/Read")(b""):
            memory.blocks[at : at + len(piece)] = piece
            at += len(piece)

    return read


async def read_ucx(memory: ArenaMemory, ip: str, offer: str) -> Read:
    transport = UcxTransport(memory)
    source = Source("source", f"{ip}:1", bytes.fromhex(offer))

    async def read() -> None:
        await transport.read(source, [(slot, slot) for slot in range(memory.slots)])

    return read


async def read_nixl(memory: ArenaMemory, ip: str, offer: str) -> Read:
    agent, here = _nixl(memory, "reader")
    metadata, there = json.loads(offer)
    peer = agent.add_remote_agent(bytes.fromhex(metadata))

    def descriptors(base: int) -> object:
        size = memory.slot_bytes
        return agent.get_xfer_descs([(base + slot * size, size, 0) for slot in range(memory.slots)], "DRAM")

    async def read() -> None:
        handle = agent.initialize_xfer("READ", descriptors(here), descriptors(there), peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"the NIXL transfer ended in state {state}")
        agent.release_xfer_handle(handle)

    return read


_kept: list[object] = []
SOURCES = {"memcpy": serve_memcpy, "tcp": serve_tcp, "grpc": serve_grpc, "ucx": serve_ucx, "nixl": serve_nixl}
MAKERS = {"memcpy": read_memcpy, "tcp": read_tcp, "grpc": read_grpc, "ucx": read_ucx, "nixl": read_nixl}


def _nixl(memory: ArenaMemory, name: str):  # type: ignore[no-untyped-def]  # the library has no types
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    address = np.frombuffer(memory.blocks, np.uint8).ctypes.data
    agent.register_memory(agent.get_reg_descs([(address, len(memory.blocks), 0, "")], "DRAM"))
    return agent, address


async def source(way: str, memory: ArenaMemory) -> None:
    memory.blocks[:] = content(memory).data
    print(await SOURCES[way](memory), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def reader(way: str, memory: ArenaMemory, ip: str, offer: str) -> None:
    read = await MAKERS[way](memory, ip, offer)
    expected = content(memory)
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        memory.blocks[:] = bytes(len(memory.blocks))
        began, cpu_before = time.perf_counter(), time.process_time()
        await read()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_before
        if not np.array_equal(np.frombuffer(memory.blocks, np.uint8), expected):
            raise RuntimeError(f"{way} delivered wrong bytes")
        print(seconds, cpu, flush=True)


def main() -> None:
    role, way, block_bytes, blocks, *rest = sys.argv[1:]
    memory = arena(int(block_bytes), int(blocks))
    asyncio.run(source(way, memory) if role == "source" else reader(way, memory, *rest))
    os._exit(0)


if __name__ == "__main__":
    main()
