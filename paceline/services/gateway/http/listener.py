"""The listening socket of the HTTP API (TCP or Unix, without or with TLS), and the limits of its connections.

uvicorn's own HTTP connection limits neither the size of a request's head nor the time in which it arrives. One client
could fill the memory, and many connections could stay open for ever, before our code sees a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError
from paceline.services.common.certificates import CertificateFiles, renewed_server_context
from paceline.services.common.lifecycle import reachable_address
from paceline.services.common.unix_socket import socket_address

HANDSHAKE_SECONDS = 10.0
"""Longest time of a TLS handshake, in seconds."""
GOODBYE_SECONDS = 5.0
"""Longest time for a client to answer the end of a TLS connection, in seconds."""
_BACKLOG = 2048


class Listener:
    """A listening socket. Connections wait there until `serve` is called. Create it with `listen`.

    Attributes:
        address: the address as host:port or unix:PATH.
    """

    def __init__(self, listening: socket.socket, address: str, tls: ssl.SSLContext | None) -> None:
        self._socket = listening
        self._tls = tls
        self.address = address

    @property
    def url(self) -> str:
        if self._socket.family == socket.AF_UNIX:
            return self.address
        return f"{'https' if self._tls else 'http'}://{self.address}"

    async def serve(self, make: Callable[[], asyncio.Protocol]) -> asyncio.Server:
        """Start to accept connections. Each connection is served by a new protocol that `make` returns."""
        loop = asyncio.get_running_loop()
        is_unix = self._socket.family == socket.AF_UNIX
        create = loop.create_unix_server if is_unix else loop.create_server
        if self._tls is None:
            return await create(make, sock=self._socket, backlog=_BACKLOG)
        return await create(
            make,
            sock=self._socket,
            backlog=_BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=GOODBYE_SECONDS,
        )


@contextlib.contextmanager
def listen(config: GatewayConfig) -> Iterator[Listener]:
    """Yield the listener that the options ask for. At the end its socket is closed, and a Unix socket is removed.

    Raises ConfigError if the address is in use or a certificate cannot be used.
    """
    tls = None
    if config.ssl_certfile:
        files = CertificateFiles(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        tls = renewed_server_context(files, ssl.VerifyMode(config.ssl_cert_reqs))
    if config.uds:
        path = Path(config.uds).absolute()
        with _unix_socket(path) as listening:
            yield Listener(listening, f"unix:{path}", tls)
    else:
        with contextlib.closing(_tcp_socket(config.host, config.port)) as listening:
            yield Listener(listening, reachable_address(config, listening.getsockname()[1]), tls)


def _tcp_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio's own loop disables Nagle's algorithm on accepted connections only if the protocol is named here.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        # Binding alone does not claim the port: another socket with SO_REUSEADDR may bind it too.
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another port with --port"
        ) from error
    return listening


@contextlib.contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    """Yield a Unix socket at `path`, which only this user may use. A socket that a killed process left is replaced.

    Raises ConfigError if a server listens at `path`, or if something else than a socket is there.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            _check_free(path)
            with socket_address(hidden) as address:
                listening.bind(address)
            # The socket gets its name last, when others may connect and nobody else can.
            hidden.chmod(0o600)
            listening.listen(_BACKLOG)
            inode = hidden.stat().st_ino
            hidden.rename(path)
        except OSError as error:
            hidden.unlink(missing_ok=True)
            raise ConfigError(f"cannot listen at {path} ({error.strerror}); choose another path with --uds") from error
        try:
            yield listening
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:  # a gateway that was started since may have its own socket there
                    path.unlink()


def _check_free(path: Path) -> None:
    """Raise ConfigError unless there is nothing at `path`, or a socket at which no server listens."""
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise ConfigError(f"--uds {path} exists and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX) as probe, socket_address(path) as address:
        probe.setblocking(False)  # a server whose queue is full would make `connect` wait
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            return
        except BlockingIOError:
            pass
    raise ConfigError(f"a server listens at --uds {path} already; stop it, or choose another path")


MAX_HEAD_BYTES = 64 << 10
"""Largest size of a request line together with its headers, in bytes."""
HEAD_SECONDS = 30.0
"""Longest time in which a head must arrive, in seconds. Idle kept-alive connections are closed by uvicorn."""
OLD_VERSIONS = ("0.9", "1.0")
"""Versions of HTTP that do not know chunked transfer encoding."""
TOO_LARGE = f"The head of the request is larger than {MAX_HEAD_BYTES} bytes."


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP connection, with limits of the size of a request's head and of the time in which it arrives."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = False
        self._head_bytes = 0
        self._chunk_bytes = 0
        """Size of the received data that is being parsed, in bytes; 0 after another request has ended in this data."""
        self._refusal = ""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._chunk_bytes = len(data)
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._end_head()
            self.send_400_response(TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self._refusal or msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        # A head that comes at once is over when its chunk has been parsed, so it is measured here.
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refusal = TOO_LARGE
            raise ValueError(TOO_LARGE)  # the parser stops, and uvicorn answers
        super().on_headers_complete()
        if self.scope["http_version"] in OLD_VERSIONS:
            self.cycle.waiting_for_100_continue = False  # such a client knows no status 100
            self.cycle.send = UnchunkedSend(self.cycle)  # type: ignore[assignment, method-assign]

    def on_message_complete(self) -> None:
        self._chunk_bytes = 0
        super().on_message_complete()

    def _begin_head(self) -> None:
        self._end_head()
        self._in_head, self._head_bytes = True, self._chunk_bytes
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _end_head(self) -> None:
        self._in_head = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.close()


class UnchunkedSend:
    """The `send` function of an answer to a client whose version of HTTP does not know chunks.

    The end of a body of unknown length is the end of the connection, which uvicorn closes after each such answer.
    uvicorn itself would send this body in chunks.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = True

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)  # type: ignore[arg-type]
