"""Blocks over the connection that the services have anyway: no set-up, works wherever gRPC does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc.aio

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.rpc import heeding_cancellation, unmapped_error
from paceline.services.common.wire import key_to_pb
from paceline.services.kvtransfer.transport import ArenaMemory, Source

READ_SECONDS = 30.0
"""For the blocks of one call, of which there are some hundreds at most."""


class GrpcTransport:
    """`Transport` through the method `Read` of the other service, which checks that the blocks are the hold's."""

    name = "grpc"

    def __init__(self, memory: ArenaMemory) -> None:
        self._memory = memory

    def offer(self) -> bytes:
        return b""

    async def read(self, source: Source, slots: Sequence[tuple[int, int]]) -> None:
        if not slots:
            return
        stub: pb_grpc.KVTransferAsyncStub = pb_grpc.KVTransferStub(source.channel)
        request = pb.ReadRequest(key=key_to_pb(source.key), slots=[there for there, _ in slots])
        call = stub.Read(request, timeout=READ_SECONDS)
        try:
            pieces = _pieces(call)
            for _, here in slots:
                await self._fill(self._memory.slot(here), pieces)
        except grpc.aio.AioRpcError as error:
            raise unmapped_error(error, f"kvtransfer at {source.address}") from error
        finally:
            call.cancel()

    @staticmethod
    async def _fill(block: memoryview, pieces: AsyncIterator[bytes]) -> None:
        done = 0
        while done < len(block):
            piece = await anext(pieces, b"")
            if not 0 < len(piece) <= len(block) - done:
                raise UnavailableError(f"{len(piece)} bytes came where {len(block) - done} of a block were left")
            block[done : done + len(piece)] = piece
            done += len(piece)

    async def close(self) -> None:
        """Nothing is its own."""


async def _pieces(call: grpc.aio.UnaryStreamCall[pb.ReadRequest, pb.ReadReply]) -> AsyncIterator[bytes]:
    while isinstance(reply := await heeding_cancellation(call.read()), pb.ReadReply):
        yield reply.data
