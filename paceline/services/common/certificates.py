"""Certificates in files. A file that changes is read again, so that renewed certificates need no restart."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from paceline.core.errors import ConfigError

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of PEM files."""

    certfile: str
    """File with the certificate, followed by the certificates of intermediate authorities, if there are any."""
    keyfile: str
    """File with the certificate's private key, which must not need a password."""
    ca_certs: str = ""
    """File with the authorities whose certificates are accepted from the other side; "" to ask for no certificate."""

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return the contents of the three files. Raises ConfigError."""
        return _read(self.certfile), _read(self.keyfile), _read(self.ca_certs) if self.ca_certs else b""

    def versions(self) -> list[tuple[int, ...] | None]:
        """Return each file's version: numbers that change when it is written or replaced; None if it is missing."""
        return [_version(path) for path in (self.certfile, self.keyfile, self.ca_certs) if path]


class Renewed(Generic[T]):
    """A value that is made from certificate files, and made again after the files have changed.

    If the changed files cannot be used, the last good value stays, and an error is logged. Several threads may use it.

    Args:
        make: function that makes the value from the files. It raises ConfigError if the files cannot be used, and the
            constructor passes this error on.
    """

    def __init__(self, files: CertificateFiles, make: Callable[[CertificateFiles], T]) -> None:
        self._files = files
        self._make = make
        self._lock = threading.Lock()
        self._versions = files.versions()
        self._value = make(files)

    def current(self) -> T:
        """Return the value for the present files: the same object as before if the files have not changed."""
        with self._lock:
            versions = self._files.versions()
            if versions != self._versions:
                self._versions = versions
                try:
                    self._value = self._make(self._files)
                    log.info("new certificates are in use: %s has changed", self._files.certfile)
                except ConfigError as error:
                    log.error("new certificates cannot be used, and the old ones stay in use: %s", error)
            return self._value


def server_context(files: CertificateFiles, verify: ssl.VerifyMode) -> ssl.SSLContext:
    """Return a TLS context for servers of HTTP/1.1.

    Args:
        verify: whether clients may or must show a certificate, which must be signed by one of `files.ca_certs`.

    Raises ConfigError if the files cannot be used.
    """
    certificate, _, _ = files.read()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.certfile, files.keyfile, password=lambda: _refuse_password(files.keyfile))
    except (OSError, ValueError) as error:
        reason = error if b"-----BEGIN CERTIFICATE-----" in certificate else "there is no certificate in PEM format"
        raise ConfigError(f"{files.certfile} and {files.keyfile} are no certificate with its key: {reason}") from None
    if files.ca_certs:
        try:
            context.load_verify_locations(files.ca_certs)
        except OSError as error:
            raise ConfigError(f"{files.ca_certs} holds no PEM certificates of authorities: {error}") from None
    context.verify_mode = verify
    return context


def renewed_server_context(files: CertificateFiles, verify: ssl.VerifyMode) -> ssl.SSLContext:
    """Return a TLS context for servers of HTTP/1.1, whose handshakes read the files again if they have changed.

    The arguments and errors are those of `server_context`.
    """
    contexts = Renewed(files, lambda files: server_context(files, verify))
    listening = server_context(files, verify)

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = contexts.current()

    # OpenSSL calls this at the beginning of each handshake, even if the client names no server.
    listening.sni_callback = choose
    return listening


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _version(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _refuse_password(keyfile: str) -> NoReturn:
    raise ValueError(f"{keyfile} needs a password; write the key to a file without one, which only this user may read")
