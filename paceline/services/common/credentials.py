"""The credentials of a cluster's services: a secret, certificates if they speak TLS, and the password of Redis."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from paceline.core.config import ServiceConfig
from paceline.services.common.certificates import CertificateFiles, Renewed, server_context
from paceline.services.common.secret import Secret, read_secret


class ClusterTls:
    """TLS between services. Both sides show a certificate, which an authority in `files.ca_certs` must have signed.

    Args:
        name: the name that the certificates of all servers contain; "" if each contains the host name or IP address
            under which its server is called.

    Raises ConfigError if the files cannot be used.
    """

    def __init__(self, files: CertificateFiles, name: str = "") -> None:
        self.name = name
        self._sides = Renewed(files, _both_sides)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials for a new connection. They are the same object until the files change."""
        return self._sides.current().channel

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a server. Each handshake uses the certificate files as they are at that time."""
        used = self._sides.current().server

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            current = self._sides.current().server
            if current is used:
                return None
            used = current
            return current

        return grpc.dynamic_ssl_server_credentials(used, renewed, require_client_authentication=True)  # type: ignore[arg-type]


class _Sides(NamedTuple):
    channel: grpc.ChannelCredentials
    server: grpc.ServerCertificateConfiguration


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secret and the certificates that a service shows to other services and requires of them; none by default."""

    secret: Secret = Secret()
    tls: ClusterTls | None = None

    def __bool__(self) -> bool:
        return bool(self.secret) or self.tls is not None


def read_credentials(config: ServiceConfig) -> Credentials:
    """Return the credentials in the files that the options name. Raises ConfigError if a file cannot be used."""
    secret = read_secret(config.auth_token_file)
    if not config.cluster_certfile:
        return Credentials(secret)
    files = CertificateFiles(config.cluster_certfile, config.cluster_keyfile, config.cluster_ca_certs)
    return Credentials(secret, ClusterTls(files, config.cluster_cert_name))


def _both_sides(files: CertificateFiles) -> _Sides:
    """Return the credentials of both sides of a connection. Raises ConfigError if the files cannot be used."""
    server_context(files, ssl.CERT_REQUIRED)  # gRPC would not explain the fault in the files
    certificate, key, authorities = files.read()
    return _Sides(
        grpc.ssl_channel_credentials(authorities, key, certificate),
        grpc.ssl_server_certificate_configuration([(key, certificate)], authorities),
    )
