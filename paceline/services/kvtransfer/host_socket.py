"""The Unix socket of a host, on which its workers ask for blocks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError

from paceline.core.errors import ConfigError, PacelineError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.framed import Framed, socket_address

Answer: TypeAlias = pb.BatchReply | Coroutine[Any, Any, pb.BatchReply]

log = logging.getLogger(__name__)


class HostSocket:
    """Listens from `start` to `close`. Whoever connects runs as the same user, and each request names a session, which
    only its worker knows: so a connection needs no secret.

    Args:
        folder: that of the arena, which all workers of the host see.
        serve: takes a request, in the order of a connection; returns the reply, or what gives it later. Raises
            PacelineError for one that cannot be taken, which ends the connection.
    """

    def __init__(self, folder: Path, serve: Callable[[pb.BatchRequest], Answer]) -> None:
        self.path = folder / f"{_prefix()}{secrets.token_hex(8)}.sock"
        self._serve = serve
        self._connections: set[_Connection] = set()
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
                connection.abort()
            self.path.unlink(missing_ok=True)

    def _connection(self) -> _Connection:
        connection = _Connection(self._serve, self._connections.discard)
        self._connections.add(connection)
        return connection


class _Connection(Framed):
    """One worker's."""

    def __init__(self, serve: Callable[[pb.BatchRequest], Answer], on_end: Callable[[_Connection], None]) -> None:
        super().__init__(self._take, self._end)
        self._serve = serve
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_full = False

    def _take(self, message: bytes) -> None:
        with self._ending():
            request = pb.BatchRequest.FromString(message)
            answer = self._serve(request)
            if isinstance(answer, pb.BatchReply):
                # Behind those who have waited for what this request did, and before anything else is done here.
                self.waits = True
                self._loop.call_soon(self._reply_now, request.id, answer)
            else:
                task = self._loop.create_task(self._reply_later(request.id, answer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _reply_now(self, request_id: int, reply: pb.BatchReply) -> None:
        self._reply(request_id, reply)
        self._go_on()

    async def _reply_later(self, request_id: int, answer: Coroutine[Any, Any, pb.BatchReply]) -> None:
        with self._ending():
            self._reply(request_id, await answer)

    def _reply(self, request_id: int, reply: pb.BatchReply) -> None:
        reply.id = request_id
        self.send(reply)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Ends the connection where a request cannot be taken."""
        try:
            yield
        except (PacelineError, DecodeError) as error:
            log.warning("a worker's connection is ended: %s", error)
            self.abort()
        except Exception:
            log.exception("unexpected error in a request")
            self.abort()

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._on_end(self)

    # Who does not take replies cannot ask for more of them.

    def pause_writing(self) -> None:
        self._is_full = True
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_full = False
        if self.transport is not None:
            self.transport.resume_reading()
        self._go_on()

    def _go_on(self) -> None:
        if not self._is_full:
            self.waits = False
            self.go_on()


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
