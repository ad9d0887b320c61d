"""Details of the gRPC transport: pieces of large blocks, and calls that end."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import RpcServer
from paceline.services.kvtransfer.transports.grpc_transport import Channels, GrpcTransport
from paceline.services.kvtransfer.transports.transport import ArenaMemory, Source
from tests.services.kvtransfer.transport_cases import arena

SLOT = 5 << 19
"""Bytes of a slot: more than two pieces."""


def transport(memory: ArenaMemory, channels: Channels) -> GrpcTransport:
    """Return a transport that never gives up on a silent source."""
    return GrpcTransport(memory, channels, silence_seconds=1000)


async def send_into(source: GrpcTransport, write: Any, slots: list[int]) -> None:
    token = source.offer()[-16:]
    await source.send(pb.ReadRequest(token=token, slots=slots), write)


class Half(pb_grpc.KVTransferServicer):
    """A source that sends these bytes, and then ends or is silent."""

    def __init__(self, data: bytes, ends: bool = False) -> None:
        self._data = data
        self._ends = ends
        self.left = asyncio.Event()

    async def Read(self, request: pb.ReadRequest, context: Any) -> AsyncIterator[pb.ReadReply]:
        try:
            yield pb.ReadReply(data=self._data)
            if not self._ends:
                await asyncio.Event().wait()
        finally:
            self.left.set()


@contextlib.asynccontextmanager
async def reader_of(half: Half, slot_bytes: int) -> AsyncIterator[tuple[GrpcTransport, ArenaMemory, Source]]:
    server, channels, memory = RpcServer("127.0.0.1", 0, Credentials()), Channels(Credentials()), arena(1, slot_bytes)
    pb_grpc.add_KVTransferServicer_to_server(half, server.server)
    own = transport(memory, channels)
    try:
        yield own, memory, Source("half", f"127.0.0.1:{await server.start()}", own.offer())
    finally:
        await own.close()
        await channels.close()
        await server.close(0)


async def test_a_block_of_several_pieces_is_put_together_in_their_order() -> None:
    content = random.Random(3).randbytes(SLOT)
    pieces: list[pb.ReadReply] = []
    memory = arena(2, SLOT)
    memory.slot(1)[:] = content

    async def write(reply: pb.ReadReply) -> None:
        pieces.append(reply)

    await send_into(transport(memory, Channels(Credentials())), write, [1])
    assert b"".join(piece.data for piece in pieces) == content

    class All(Half):
        async def Read(self, request: pb.ReadRequest, context: Any) -> AsyncIterator[pb.ReadReply]:
            for piece in pieces:
                yield piece

    async with reader_of(All(b""), SLOT) as (own, here, source):
        await own.read(source, [(1, 0)])
        assert here.slot(0) == content


async def test_a_closed_transport_sends_no_more() -> None:
    own = transport(arena(1, SLOT), Channels(Credentials()))
    pieces: list[pb.ReadReply] = []

    async def write(reply: pb.ReadReply) -> None:
        pieces.append(reply)
        await own.close()

    with pytest.raises(UnavailableError, match="closed"):
        await send_into(own, write, [0])
    assert len(pieces) == 1


async def test_closing_ends_a_read_whose_source_is_silent() -> None:
    async with reader_of(Half(b"12"), 8) as (own, memory, source):
        task = asyncio.create_task(own.read(source, [(0, 0)]))
        async with asyncio.timeout(30):
            while bytes(memory.slot(0)[:2]) != b"12":
                await asyncio.sleep(0.01)
            await own.close()
            with pytest.raises(UnavailableError, match="closed"):
                await task


async def test_a_source_of_which_nothing_more_is_wanted_stops() -> None:
    half = Half(b"more than a block has")
    async with reader_of(half, 8) as (own, _, source):
        with pytest.raises(UnavailableError, match="21 bytes came when 8"):
            await own.read(source, [(0, 0)])
        async with asyncio.timeout(30):
            await half.left.wait()


async def test_half_a_block_is_none() -> None:
    async with reader_of(Half(b"12", ends=True), 8) as (own, _, source):
        with pytest.raises(UnavailableError, match="0 bytes came when 6"):
            await own.read(source, [(0, 0)])
