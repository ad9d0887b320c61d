"""Messages between processes of a host, over Unix sockets beside the arena. Each message is preceded by its length.

These messages replace gRPC, which has threads of its own in both processes. For small messages these threads take
longer than the rest of a handoff, or than the rest of the way of a token to the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from google.protobuf.message import Message

from paceline.core.errors import ConfigError

MAX_MESSAGE_BYTES = 16 << 20
"""Largest size of a message, in bytes. The hashes of ten million tokens fit; a larger message is an attack or a bug."""
_LENGTH_BYTES = 4


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Yield a short address for a Unix socket whose path may be long. The system's addresses hold at most 107 bytes.

    Raises:
        OSError: the socket's folder does not exist.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class Framed(asyncio.Protocol):
    """One end of a connection that carries messages.

    Args:
        on_message: called with each message, in order.
        on_lost: called once when the connection has ended.
    """

    def __init__(self, on_message: Callable[[bytes], None], on_lost: Callable[[], None] = lambda: None) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._came = bytearray()
        self.transport: asyncio.Transport | None = None
        self.waits = False
        """Whether incoming messages are kept here. To get them, set it to False and call `go_on`."""

    def send(self, message: Message) -> None:
        """Send a message. Do nothing if the connection has ended."""
        if self.transport is not None and self.is_open:
            data = message.SerializeToString()
            self.transport.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def close(self) -> None:
        """End the connection after all messages that were sent before."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """End the connection at once. Messages that are still in its buffer are lost."""
        if self.transport is not None:
            self.transport.abort()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._came += data
        self.go_on()

    def go_on(self) -> None:
        """Call `on_message` with the messages that have arrived, until `waits` is set."""
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


class UnixListener:
    """A listener, from `start` to `close`. Only processes of the same user can connect, so they need no secret.

    Args:
        folder: the arena's folder, which all workers of the host see.
        make: function that returns this side's end of a new connection.
    """

    def __init__(self, folder: Path, make: Callable[[], Framed]) -> None:
        self.path = folder / f"{_prefix()}{secrets.token_hex(8)}.sock"
        self._make = make
        self._connections: weakref.WeakSet[Framed] = weakref.WeakSet()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start to listen. Raises ConfigError if the socket cannot be created."""
        remove_stale_sockets(self.path.parent)
        listener, hidden = socket.socket(socket.AF_UNIX), self.path.with_suffix(".new")
        try:
            with socket_address(hidden) as address:
                listener.bind(address)
            os.chmod(hidden, 0o600)  # before the socket listens, so that no other user connects
            self._server = await asyncio.get_running_loop().create_unix_server(self._connection, sock=listener)
            hidden.rename(self.path)  # not earlier, or a service that is starting might remove the socket as stale
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen at {self.path} ({error}); choose another --arena-dir") from error

    async def close(self) -> None:
        """End all connections and remove the socket."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.close()
            self.path.unlink(missing_ok=True)

    def _connection(self) -> Framed:
        connection = self._make()
        self._connections.add(connection)
        return connection


def remove_stale_sockets(folder: Path) -> None:
    """Remove this user's sockets in a folder that killed services have left there."""
    for path in folder.glob(f"{_prefix()}*.sock"):
        with socket.socket(socket.AF_UNIX) as probe, socket_address(path) as address:
            probe.setblocking(False)
            try:
                probe.connect(address)
            except ConnectionRefusedError:
                if path.is_socket():
                    path.unlink(missing_ok=True)
            except OSError:
                continue  # the socket is another user's, is gone by now, or belongs to a service that is alive but busy


def _prefix() -> str:
    return f"paceline-{os.getuid()}-"
