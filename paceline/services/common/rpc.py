"""gRPC for all services: channels and servers with one set of options, and health checks."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # missing in the stubs

from paceline.core.errors import ConfigError, RefusedError, UntrustedError
from paceline.services.common.auth import Prover, RequireProof, answer
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc_errors import unmapped_error
from paceline.services.common.secret import Secret
from paceline.services.common.tasks import heeding_cancellation
from paceline.services.common.tls_channel import TlsChannel
from paceline.services.common.wire_version import HEADER, OURS, RequireWire, WireVersions

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""Largest size of a message, in bytes. An image of 16 Mi pixels fits; a larger message is an attack or a bug."""

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Detect within seconds that a peer's machine has vanished. TCP alone may take hours.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)

_IDLE_MS = 60_000
"""Time without a call after which a channel closes its connection until the next call, in milliseconds."""


class ChannelWithMetadata(grpc.aio.Channel):
    """A channel that passes each call to another channel and adds its own metadata to the call.

    A gRPC interceptor is not used, because it replaces the channel's call objects with its own, which end and are
    cancelled differently.

    Args:
        same: name and value of a metadata entry that every call gets.
        prover: makes the metadata entry with each call's proof of the secret; None if there is no secret.
    """

    def __init__(self, channel: grpc.aio.Channel, same: tuple[str, str], prover: Prover | None) -> None:
        self.prover = prover
        self._channel = channel
        self._same = same

    def _own(self, method: str) -> tuple[tuple[str, str], ...]:
        return (self._same,) if self.prover is None else (self._same, self.prover.header(method))

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._with_metadata(method, self._channel.unary_unary(method, *args, **options))

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._with_metadata(method, self._channel.unary_stream(method, *args, **options))

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._with_metadata(method, self._channel.stream_unary(method, *args, **options))

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._with_metadata(method, self._channel.stream_stream(method, *args, **options))

    def _with_metadata(self, method: str, begin: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = (), **options: Any) -> Any:
            return begin(*args, metadata=(*(metadata or ()), *self._own(method)), **options)

        return call

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> ChannelWithMetadata:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *args: Any) -> None:
        await self._channel.__aexit__(*args)


def open_channel(
    address: str, credentials: Credentials, wire: WireVersions = OURS, *, meant: str = ""
) -> grpc.aio.Channel:
    """Return a channel that shows `credentials`, and reconnects within a second when the peer is back.

    Args:
        wire: the protocol versions that this service speaks.
        meant: target in the proofs of the calls (see `auth`), if the service may not know this address; "" for the
            address.
    """
    backoff = (
        ("grpc.initial_reconnect_backoff_ms", 100),
        # This is also the deadline of one attempt to connect. It is long because the other side may be busy.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    )
    # Channels must not share a connection, and services of one cluster need no proxy. A gateway does not keep a
    # connection to each of thousands of members.
    private = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.client_idle_timeout_ms", _IDLE_MS),
    )
    options: tuple[tuple[str, int | str], ...] = _OPTIONS + backoff + private
    channel: grpc.aio.Channel
    if (tls := credentials.tls) is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        options += (("grpc.ssl_target_name_override", tls.name),) if tls.name else ()
        channel = TlsChannel(
            tls, lambda channel_credentials: grpc.aio.secure_channel(address, channel_credentials, options=options)
        )
    prover = Prover(credentials.secret, meant or address) if credentials.secret else None
    return ChannelWithMetadata(channel, (HEADER, str(wire)), prover)


class _Health(health_aio.HealthServicer):  # type: ignore[misc]  # missing in the stubs
    """The standard health service. It also proves that it has the secret, to callers that ask for a proof."""

    def __init__(self, secret: Secret) -> None:
        super().__init__()
        self._secret = secret

    async def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if self._secret:
            context.set_trailing_metadata(answer(self._secret, context.invocation_metadata() or ()))
        return await super().Check(request, context)


class RpcServer:
    """A gRPC server with the standard health service.

    Its health is reported under "" and under its own name. If there is a secret, all calls without a proof of it are
    refused, health checks included. With TLS, a connection without a certificate of the cluster ends before any call.
    Calls from services that speak none of our protocol versions are refused, except health checks.

    Register servicers on `server`, then call `start`, then `set_ready`. `close` refuses new calls and lets running
    ones end.
    """

    def __init__(
        self, host: str, port: int, credentials: Credentials, name: str = "", wire: WireVersions = OURS
    ) -> None:
        self._known_as: set[str] = set()
        secret = (RequireProof(credentials.secret, self._known_as),) if credentials.secret else ()
        guards = (*secret, RequireWire(wire))
        # Without so_reuseport a second start on a taken port fails. A connection without a handshake is closed in 10 s.
        fixed = (("grpc.so_reuseport", 0), ("grpc.server_handshake_timeout_ms", 10_000))
        self.server = grpc.aio.server(interceptors=guards, options=_OPTIONS + fixed)
        self._credentials = credentials
        self._health = _Health(credentials.secret)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._host = host
        self._port = port
        self._bound = False
        self._names = {"", name}

    def bind(self) -> int:
        """Bind the port and return it. Calls wait until `start`. Raises ConfigError if the port cannot be used."""
        if not self._credentials and not is_loopback(self._host):
            log.warning(
                "anybody who can connect to %s:%d can use this service: name a file with a secret in --auth-token-file "
                "here and in all services of the cluster; `paceline token FILE` makes one",
                self._host,
                self._port,
            )
        target = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        try:
            if (tls := self._credentials.tls) is None:
                self._port = self.server.add_insecure_port(target)
            else:
                self._port = self.server.add_secure_port(target, tls.server_credentials())
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {target}: is the port taken? choose another with --port") from error
        self._bound = True
        if not _is_everywhere(self._host):
            self.known_as(f"{target.rpartition(':')[0]}:{self._port}")
        return self._port

    def known_as(self, address: str) -> str:
        """Accept calls whose proofs have this target, an address or a name such as HOST_SERVICE. Return the target."""
        self._known_as.add(address)
        return address

    async def start(self) -> int:
        """Begin to serve, with the health status "not serving", and return the port.

        Raises ConfigError if the port cannot be used.
        """
        if not self._bound:
            self.bind()
        await self.set_ready(False)
        await self.server.start()
        return self._port

    async def set_ready(self, ready: bool) -> None:
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, serving if ready else not_serving)

    async def close(self, grace_seconds: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_seconds)


async def is_serving(channel: grpc.aio.Channel, name: str = "", timeout: float = 1.0) -> bool:
    """Ask the standard health service whether the service with this name takes requests.

    Returns False if another service is at the address. Raises RefusedError if the service does not accept our secret,
    and UntrustedError if TLS fails or the service does not prove that it has our secret.
    """
    return bool(await health_of(channel, name, timeout) == health_pb2.HealthCheckResponse.SERVING)


async def health_of(
    channel: grpc.aio.Channel, name: str = "", timeout: float = 1.0
) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType | None:
    """Return the status that the standard health service reports for the service with this name; None if there is no
    answer.

    Raises the errors of `is_serving`.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    prover = channel.prover if isinstance(channel, ChannelWithMetadata) else None
    challenge = None if prover is None else prover.challenge()
    asked = () if challenge is None else (challenge,)
    try:
        call = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=timeout, metadata=asked)
        reply = await heeding_cancellation(call)
        answered = await call.trailing_metadata()
    except grpc.aio.AioRpcError as error:
        reason = unmapped_error(error, name or "the service")
        if isinstance(reason, RefusedError | UntrustedError):
            raise reason from None
        return None
    if prover and challenge and not prover.is_answered(challenge, answered or ()):
        raise UntrustedError(
            f"{name or 'the service'} does not prove that it has the secret of this cluster: it was started without "
            "--auth-token-file, or another program has taken its address"
        )
    return reply.status


def _is_everywhere(host: str) -> bool:
    """Return whether a server on `host` listens on all addresses, so that other machines cannot call `host` itself."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
