"""gRPC for all services: one set of options, health checks, and errors mapped at the boundary."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # missing in the stubs

from paceline.core.errors import (
    BusyError,
    ConfigError,
    DrainingError,
    InvalidRequestError,
    PacelineError,
    RefusedError,
    StaleError,
    TransferError,
    UnavailableError,
    UntrustedError,
)
from paceline.services.common.auth import RequireSecret, secret_header
from paceline.services.common.channel_metadata import ChannelWithMetadata
from paceline.services.common.credentials import Credentials
from paceline.services.common.tls_channel import TlsChannel, tls_problem
from paceline.services.common.wire_check import INCOMPATIBLE, RequireWire
from paceline.services.common.wire_version import HEADER, OURS, WireVersions

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""Size of the largest message. An image of 16 Mi pixels for an encoder fits; a larger message is an attack or a bug."""

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
"""Time without a call after which a channel closes its connection until the next call."""

_CODES: tuple[tuple[type[PacelineError], grpc.StatusCode], ...] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (BusyError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (StaleError, grpc.StatusCode.ABORTED),
    (TransferError, grpc.StatusCode.DATA_LOSS),
    (PacelineError, grpc.StatusCode.FAILED_PRECONDITION),
)

_PARAM = "paceline-param"
"""Key of the trailing metadata that names the invalid field of an INVALID_ARGUMENT."""
_DRAINING = "paceline-draining"
"""Key of the trailing metadata that tells a draining worker from one that has failed: both are UNAVAILABLE."""

_OURS = ("paceline-error", "1")
"""Trailing metadata of errors that a service answered itself. gRPC makes the other ones, in its own words."""

_GRPC_SAYS = {
    grpc.StatusCode.UNAVAILABLE: "has ended or cannot be reached",
    grpc.StatusCode.CANCELLED: "cancelled the call",
    grpc.StatusCode.DEADLINE_EXCEEDED: "did not answer in time",
    grpc.StatusCode.UNIMPLEMENTED: "does not know this call; is it of an older release?",
}
"""What gRPC's own errors mean. Callers get these words, because gRPC's are about addresses and sockets."""


def open_channel(address: str, credentials: Credentials, wire: WireVersions = OURS) -> grpc.aio.Channel:
    """Return a channel that shows `credentials`, and reconnects within a second when the peer is back.

    Args:
        wire: the protocol versions that this service speaks.
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
        channel = TlsChannel(tls, lambda own: grpc.aio.secure_channel(address, own, options=options))
    secret = [secret_header(credentials.secret)] if credentials.secret else []
    return ChannelWithMetadata(channel, [(HEADER, str(wire)), *secret])


class RpcServer:
    """A gRPC server with the standard health service.

    Its health is reported under "" and under its own name. If there is a secret, all calls without it are refused,
    health checks included. With TLS, a connection without a certificate of the cluster ends before any call. Calls of
    services that speak none of our protocol versions are refused, except health checks.

    Register servicers on `server`, then call `start`, then `set_ready`. `close` refuses new calls and lets running
    ones end.
    """

    def __init__(
        self, host: str, port: int, credentials: Credentials, name: str = "", wire: WireVersions = OURS
    ) -> None:
        secret = (RequireSecret(credentials.secret),) if credentials.secret else ()
        guards = (*secret, RequireWire(wire))
        # Without so_reuseport a second start on a taken port fails. A connection without a handshake is closed in 10 s.
        own = (("grpc.so_reuseport", 0), ("grpc.server_handshake_timeout_ms", 10_000))
        self.server = grpc.aio.server(interceptors=guards, options=_OPTIONS + own)
        self._credentials = credentials
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._host = host
        self._port = port
        self._bound = False
        self._names = {"", name}

    def bind(self) -> int:
        """Take the port and return it. Calls wait until `start`. Raises ConfigError if the port cannot be used."""
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
        return self._port

    async def start(self) -> int:
        """Serve, not ready yet, and return the port. Raises ConfigError if the port cannot be used."""
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


async def heeding_cancellation(operation: Awaitable[T]) -> T:
    """Await an operation of a gRPC call, so that a cancellation of the current task is never lost.

    gRPC drops a cancellation that comes together with the call's status, and returns the status instead. Then a timeout
    around the operation would never end, and a cancelled task would go on.
    """
    try:
        return await operation
    finally:
        if is_cancelled():
            raise asyncio.CancelledError


@contextlib.contextmanager
def own_cancellation(error: Callable[[], Exception]) -> Iterator[None]:
    """Raise `error()` in place of a CancelledError of the body, unless the current task was cancelled.

    gRPC raises a CancelledError when a call or its channel was closed, and so does a future that was cancelled. A task
    that ends with it counts as cancelled. Then nobody hears of it, and who waits for its result waits for ever.
    """
    try:
        yield
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise error() from None


def is_cancelled() -> bool:
    """Return whether the current task was cancelled. A CancelledError alone does not mean this, because gRPC raises one
    when a call was cancelled, too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def is_serving(channel: grpc.aio.Channel, name: str = "", timeout: float = 1.0) -> bool:
    """Ask the standard health service whether the service with this name takes requests.

    Returns False if another service is at the address. Raises RefusedError if the service does not accept our secret,
    and UntrustedError if TLS fails.
    """
    return bool(await health_of(channel, name, timeout) == health_pb2.HealthCheckResponse.SERVING)


async def health_of(
    channel: grpc.aio.Channel, name: str = "", timeout: float = 1.0
) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType | None:
    """Return what the standard health service says about the service with this name; None if there is no answer.

    Raises the same errors as `is_serving`.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        reply = await heeding_cancellation(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=timeout))
    except grpc.aio.AioRpcError as error:
        reason = unmapped_error(error, name or "the service")
        if isinstance(reason, RefusedError | UntrustedError):
            raise reason from None
        return None
    return reply.status


@contextlib.asynccontextmanager
async def mapped_errors(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:  # type: ignore[type-arg]
    """Map errors in a servicer: our errors become status codes; unexpected ones are logged and become INTERNAL."""
    try:
        yield
    except PacelineError as error:
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        await _abort(context, code, str(error), (_OURS, *_details(error)))
    except grpc.aio.AbortError:
        raise
    except DecodeError as error:
        await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"a message of this call cannot be read: {error}")
    except Exception as error:
        log.exception("unexpected error in a call")
        await _abort(context, grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")


def _details(error: PacelineError) -> Iterator[tuple[str, str]]:
    """Yield what a status code cannot say of an error, as trailing metadata."""
    if isinstance(error, InvalidRequestError) and error.param:
        yield _PARAM, error.param
    if isinstance(error, DrainingError):
        yield _DRAINING, "1"


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any],
    code: grpc.StatusCode,
    message: str,
    metadata: tuple[tuple[str, str], ...] = (),
) -> None:
    try:
        await context.abort(code, message, metadata)
    except (grpc.aio.InternalError, grpc.aio.UsageError):
        # The other side has cancelled the call. Its streams ended for this reason, and nobody needs an answer.
        raise asyncio.CancelledError from None


def unmapped_error(error: grpc.aio.AioRpcError, who: str) -> PacelineError:
    """Return our error for a status code that a caller got. `who` names the other side in the message."""
    details = error.details() or error.code().name
    metadata = list(cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ()))
    more = {key: str(value) for key, value in metadata}
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(details, more.get(_PARAM))
    if error.code() is grpc.StatusCode.UNAVAILABLE and _DRAINING in more:
        return DrainingError(f"{who}: {details}")
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # gRPC has the same code for a message that is too large. It says "Sent" or "Received" before.
        if "message larger than max" in details:
            return InvalidRequestError(f"a message to or from {who} is too large ({details}); send a smaller request")
        return BusyError(details)
    if error.code() is grpc.StatusCode.ABORTED:
        return StaleError(details)
    if error.code() is grpc.StatusCode.DATA_LOSS:
        return TransferError(details)
    if error.code() is grpc.StatusCode.UNAUTHENTICATED or INCOMPATIBLE in metadata:
        return RefusedError(f"{who} refuses us: {details}")
    if problem := tls_problem(details):
        return UntrustedError(f"no connection to {who} can be trusted: {problem} ({details})")
    if _OURS in metadata:
        return UnavailableError(f"{who}: {details}")
    return UnavailableError(f"{who} {_GRPC_SAYS.get(error.code(), 'failed with an unexpected error; its log has it')}")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
