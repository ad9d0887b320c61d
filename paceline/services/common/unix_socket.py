"""Messages between processes of a host, over Unix sockets beside the arena. Each message follows its length.

gRPC has threads of its own in both processes. For small messages they take longer than all the rest of a handoff or of
a token's way.
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


class UnixListener:
    """Listens from `start` to `close`. Whoever connects runs as the same user, so a connection needs no secret.

    Args:
        folder: that of the arena, which all workers of the host see.
        make: makes our end of a new connection.
    """

    def __init__(self, folder: Path, make: Callable[[], Framed]) -> None:
        self.path = folder / f"{_prefix()}{secrets.token_hex(8)}.sock"
        self._make = make
        self._connections: weakref.WeakSet[Framed] = weakref.WeakSet()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Raises ConfigError."""
        remove_stale_sockets(self.path.parent)
        listener, hidden = socket.socket(socket.AF_UNIX), self.path.with_suffix(".new")
        try:
            with socket_address(hidden) as address:
                listener.bind(address)
            os.chmod(hidden, 0o600)  # nobody can connect before it listens
            self._server = await asyncio.get_running_loop().create_unix_server(self._connection, sock=listener)
            hidden.rename(self.path)  # and nobody take it for a stale one
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen at {self.path} ({error}); choose another --arena-dir") from error

    async def close(self) -> None:
        """Ends all connections and removes the socket."""
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
    """Removes this user's sockets whose service was killed before it could."""
    for path in folder.glob(f"{_prefix()}*.sock"):
        with socket.socket(socket.AF_UNIX) as probe, socket_address(path) as address:
            probe.setblocking(False)
            try:
                probe.connect(address)
            except ConnectionRefusedError:
                if path.is_socket():
                    path.unlink(missing_ok=True)
            except OSError:
                continue  # nobody's of ours, gone by now, or so busy that it lives


def _prefix() -> str:
    return f"paceline-{os.getuid()}-"
