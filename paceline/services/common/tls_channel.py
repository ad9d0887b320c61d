"""A gRPC channel over TLS that outlives its certificates."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from paceline.services.common.credentials import ClusterTls
from paceline.services.common.tasks import end_tasks

RETIRE_SECONDS = 60.0
"""Time that calls on a channel that was replaced have to end, in seconds. Such calls only wait for a connection."""


class TlsChannel(grpc.aio.Channel):
    """A channel that is replaced if it has no connection and the certificate files have changed.

    gRPC fixes the credentials of a channel for its life, so the channel could not connect again after its certificate
    has expired. A connection that stands is kept, because TLS checks certificates in handshakes only.

    Args:
        open: opens a channel with credentials.
    """

    def __init__(self, tls: ClusterTls, open: Callable[[grpc.ChannelCredentials], grpc.aio.Channel]) -> None:
        self._tls = tls
        self._open = open
        self._credentials = tls.channel_credentials()
        self._channel = open(self._credentials)
        self._retiring: set[asyncio.Task[None]] = set()

    def _current(self) -> grpc.aio.Channel:
        credentials = self._tls.channel_credentials()
        if credentials is not self._credentials and self.get_state() is not grpc.ChannelConnectivity.READY:
            retiring = asyncio.create_task(_retire(self._channel))
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
            self._credentials, self._channel = credentials, self._open(credentials)
        return self._channel

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._method("unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._method("unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._method("stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._method("stream_stream", args, options)

    def _method(self, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
        channel = self._channel
        method = getattr(channel, kind)(*args, **options)

        def call(*args_of_call: Any, **options_of_call: Any) -> Any:
            nonlocal channel, method
            if self._current() is not channel:
                channel = self._channel
                method = getattr(channel, kind)(*args, **options)
            return method(*args_of_call, **options_of_call)

        return call

    async def close(self, grace: float | None = None) -> None:
        await end_tasks(*self._retiring)
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def __aenter__(self) -> TlsChannel:
        return self

    async def __aexit__(self, *args: Any) -> None:
        await self.close()


def tls_problem(details: str) -> str:
    """Return a sentence for the user if a call failed because of TLS; else "".

    Args:
        details: what gRPC says about the failed call.
    """
    if "Hostname Verification Check failed" in details:
        return (
            "its certificate does not have the address by which we call it; add the address to its subject alternative "
            "names, or give all certificates one name and --cluster-cert-name"
        )
    if found := re.search(r"CERTIFICATE_VERIFY_FAILED: ([^:]*)", details):
        return f"its certificate is not valid, {found[1]}; see --cluster-ca-certs here and --cluster-certfile there"
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not speak TLS; give --cluster-certfile to all services of the cluster, or to none"
    if "failed to connect" in details and "Socket closed" in details:
        return (
            "it ends the connection at once, as when it does not accept our certificate, or speaks TLS and we do not; "
            "see --cluster-certfile here and --cluster-ca-certs there"
        )
    return ""


async def _retire(channel: grpc.aio.Channel) -> None:
    try:
        await channel.close(RETIRE_SECONDS)
    finally:
        await channel.close(None)
