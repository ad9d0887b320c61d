"""Messages over a stream of bytes, each behind its length: what processes of a host speak on Unix sockets, where gRPC,
with threads of its own in both, takes longer than all the rest of a handoff or of a token's way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from google.protobuf.message import Message

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.rpc import MAX_MESSAGE_BYTES

_LENGTH_BYTES = 4


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """A name for a Unix socket that is short enough, wherever it lies: an address has room for 107 bytes.

    Raises:
        OSError: there is no such folder.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class Framed(asyncio.Protocol):
    """One end of a connection.

    Args:
        on_message: called with each message, in order.
        on_lost: called once, when the connection has ended.
    """

    def __init__(self, on_message: Callable[[bytes], None], on_lost: Callable[[], None] = lambda: None) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._came = bytearray()
        self.transport: asyncio.Transport | None = None
        self.waits = False
        """Whether messages that have come are left where they are, until `go_on`."""

    def send(self, message: Message) -> None:
        """Does nothing where the connection has ended."""
        if self.transport is not None and self.is_open:
            data = message.SerializeToString()
            self.transport.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def close(self) -> None:
        """Ends the connection once what was sent is on its way."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Ends the connection at once; what has not been sent is lost."""
        if self.transport is not None:
            self.transport.abort()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._came += data
        self.go_on()

    def go_on(self) -> None:
        """Takes the messages that are there."""
        while self.is_open and not self.waits and len(self._came) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._came[:_LENGTH_BYTES], "big")
            if end > _LENGTH_BYTES + MAX_MESSAGE_BYTES:
                self.abort()
            elif len(self._came) >= end:
                message = bytes(self._came[_LENGTH_BYTES:end])
                del self._came[:end]
                self._on_message(message)
            else:
                return

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()


class HostConnection:
    """A worker's connection to the kvtransfer of its host. Open it by `connect`."""

    def __init__(self) -> None:
        self._framed = Framed(self._take_reply, self._fail)
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[pb.BatchReply]] = {}

    @classmethod
    async def connect(cls, path: str) -> HostConnection:
        """Raises OSError."""
        connection, loop = cls(), asyncio.get_running_loop()
        with socket_address(Path(path)) as address:
            await loop.create_unix_connection(lambda: connection._framed, address)
        return connection

    @property
    def is_open(self) -> bool:
        return self._framed.is_open

    async def call(self, request: pb.BatchRequest) -> pb.BatchReply:
        """Sends a request and waits for its reply; one that comes later is not heard. Raises UnavailableError where
        none can come any more."""
        request.id = next(self._ids)
        reply: asyncio.Future[pb.BatchReply] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = reply
        try:
            if not self.is_open:
                self._fail()
            self._framed.send(request)
            return await reply
        finally:
            del self._waiting[request.id]

    def close(self) -> None:
        self._framed.abort()

    def _take_reply(self, message: bytes) -> None:
        reply = pb.BatchReply.FromString(message)
        waiting = self._waiting.get(reply.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def _fail(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(UnavailableError("the connection to kvtransfer has ended"))
