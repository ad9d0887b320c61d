"""The transport over gRPC: it needs no set-up and works wherever the services reach each other."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import RpcServer, open_channel
from paceline.services.common.rpc_errors import mapped_errors, unmapped_error
from paceline.services.common.tasks import heeding_cancellation, is_cancelled
from paceline.services.kvtransfer.transports.transport import ArenaMemory, Source

IDLE_SECONDS = 60.0
MOST_IDLE = 16


@dataclass(slots=True)
class _Connection:
    channel: grpc.aio.Channel
    users: int = 0
    used_at: float = 0.0
    """End of the last use, on time.monotonic()."""


class Channels:
    """Channels by address. A channel is opened at its first use, and kept for later uses until `sweep` or `close`.

    Args:
        credentials: credentials that the channels show to the services, and demand of them.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._connections: dict[str, _Connection] = {}

    @contextmanager
    def to(self, address: str) -> Iterator[grpc.aio.Channel]:
        """Yield a channel to the service at `address`. `sweep` does not close the channel during the `with`
        statement.
        """
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = _Connection(open_channel(address, self._credentials))
        connection.users += 1
        try:
            yield connection.channel
        finally:
            connection.users -= 1
            connection.used_at = time.monotonic()

    async def sweep(self) -> None:
        """Close channels that were idle for IDLE_SECONDS, and all idle ones except the MOST_IDLE last used."""
        idle = [(one.used_at, address) for address, one in self._connections.items() if not one.users]
        idle.sort(reverse=True)
        for place, (used_at, address) in enumerate(idle):
            if place >= MOST_IDLE or time.monotonic() - used_at > IDLE_SECONDS:
                connection = self._connections[address]
                if not connection.users:  # closing another channel takes time, and this one may be in use again
                    del self._connections[address]
                    await connection.channel.close(None)

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.channel.close(None)


SILENCE_SECONDS = 5.0
_PIECE_BYTES = 1 << 20
_TOKEN_BYTES = 16
_OFFER = struct.Struct(f"!Q{_TOKEN_BYTES}s")

Call = grpc.aio.UnaryStreamCall[pb.ReadRequest, pb.ReadReply]


class GrpcTransport:
    """A `Transport` that reads by calling `KVTransfer.Read` of the other service, which answers with `send`.

    Args:
        silence_seconds: a read fails if nothing comes from the source for this many seconds.
    """

    name = "grpc"

    def __init__(self, memory: ArenaMemory, channels: Channels, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._memory = memory
        self._channels = channels
        self._silence_seconds = silence_seconds
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._calls: set[Call] = set()
        self._closed = False

    def offer(self) -> bytes:
        return _OFFER.pack(self._memory.slot_bytes, self._token)

    async def read(self, source: Source, slots: Sequence[tuple[int, int]]) -> None:
        self._memory.check([here for _, here in slots])
        if not slots:
            return
        try:
            request = self._request(source.offer, [there for there, _ in slots])
            with self._channels.to(source.address) as channel:
                stub: pb_grpc.KVTransferAsyncStub = pb_grpc.KVTransferStub(channel)
                await self._read(stub.Read(request), [here for _, here in slots])
        except grpc.aio.AioRpcError as error:
            reason = unmapped_error(error, f"kvtransfer at {source.address}")
            raise UnavailableError(f"cannot read from {source.host_id} by gRPC: {reason}") from error
        except UnavailableError as error:
            raise UnavailableError(f"cannot read from {source.host_id} by gRPC: {error}") from error

    def _request(self, offer: bytes, slots: Sequence[int]) -> pb.ReadRequest:
        """Return the request for slots of a source. Raises UnavailableError if its arena cannot be read here."""
        if self._closed:
            raise UnavailableError("this transport was closed")
        if len(offer) != _OFFER.size:
            raise UnavailableError(f"an offer has {_OFFER.size} bytes, not {len(offer)}")
        slot_bytes, token = _OFFER.unpack(offer)
        if slot_bytes != self._memory.slot_bytes:
            raise UnavailableError(f"its slots have {slot_bytes} bytes, ours {self._memory.slot_bytes}")
        if any(not 0 <= slot < 1 << 32 for slot in slots):
            raise UnavailableError("a slot number is out of range")
        return pb.ReadRequest(token=token, slots=slots)

    async def _read(self, call: Call, slots: Sequence[int]) -> None:
        self._calls.add(call)
        try:
            pieces = self._pieces(call)
            for slot in slots:
                await _fill(self._memory.slot(slot), pieces)
        finally:
            self._calls.discard(call)
            call.cancel()

    async def _pieces(self, call: Call) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(self._silence_seconds):
                    reply = await heeding_cancellation(call.read())
            except TimeoutError:
                raise UnavailableError(f"nothing came for {self._silence_seconds:g} s") from None
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                raise UnavailableError("this transport was closed") from None
            if not isinstance(reply, pb.ReadReply):
                return
            yield reply.data

    async def send(self, request: pb.ReadRequest, write: Callable[[pb.ReadReply], Awaitable[None]]) -> None:
        """Write the bytes of the requested slots, whatever they contain. This is the source's side.

        Raises:
            InvalidRequestError: the token is not that of this arena's offer, or there is no such slot.
            UnavailableError: the transport was closed.
        """
        if not hmac.compare_digest(request.token, self._token):
            raise InvalidRequestError("this is not the token of this arena's offer")
        if any(slot >= self._memory.slots for slot in request.slots):
            raise InvalidRequestError(f"this arena has {self._memory.slots} slots")
        for slot in request.slots:
            block = self._memory.slot(slot)
            for first in range(0, len(block), _PIECE_BYTES):
                if self._closed:
                    raise UnavailableError("this transport was closed")
                await write(pb.ReadReply(data=bytes(block[first : first + _PIECE_BYTES])))

    async def close(self) -> None:
        self._closed = True
        for call in self._calls:
            call.cancel()


async def _fill(block: memoryview, pieces: AsyncIterator[bytes]) -> None:
    done = 0
    while done < len(block):
        piece = await anext(pieces, b"")
        if not 0 < len(piece) <= len(block) - done:
            raise UnavailableError(f"{len(piece)} bytes came when {len(block) - done} bytes of a block were left")
        block[done : done + len(piece)] = piece
        done += len(piece)


@contextlib.asynccontextmanager
async def serving_alone(
    memory: ArenaMemory, silence_seconds: float = SILENCE_SECONDS
) -> AsyncIterator[tuple[GrpcTransport, str]]:
    """Yield a transport with a gRPC server of its own on this machine, and the server's address.

    The server makes it possible to test the transport without the service. Only the offer's token protects the memory.
    """
    channels = Channels(Credentials())
    transport = GrpcTransport(memory, channels, silence_seconds)
    server = RpcServer("127.0.0.1", 0, Credentials())
    reads = _Reads(transport)  # type: ignore[abstract]  # no other method is called
    pb_grpc.add_KVTransferServicer_to_server(reads, server.server)
    address = f"127.0.0.1:{await server.start()}"
    try:
        yield transport, address
    finally:
        await transport.close()
        await channels.close()
        await server.close(0)


class _Reads(pb_grpc.KVTransferServicer):
    """The part of the kvtransfer service that the transport needs."""

    def __init__(self, transport: GrpcTransport) -> None:
        self._transport = transport

    async def Read(self, request: pb.ReadRequest, context: Any) -> None:  # type: ignore[override]
        async with mapped_errors(context):
            await self._transport.send(request, context.write)
