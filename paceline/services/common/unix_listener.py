"""A Unix socket beside the arena, on which others of the same host and user reach a service."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import weakref
from collections.abc import Callable
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.services.common.framed import Framed, socket_address


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
