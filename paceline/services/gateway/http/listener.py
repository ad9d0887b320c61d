"""The listening socket of the HTTP API: TCP or Unix, without or with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

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
