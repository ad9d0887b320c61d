"""A gRPC channel over TLS that can go on with renewed certificates."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from paceline.services.common.credentials import ClusterTls


class _Opened:
    """An open channel and the number of calls that run on it."""

    def __init__(self, credentials: grpc.ChannelCredentials, channel: grpc.aio.Channel) -> None:
        self.credentials = credentials
        self.channel = channel
        self.calls = 0


class TlsChannel(grpc.aio.Channel):
    """A channel that is replaced if it has no connection and the certificate files have changed.

    gRPC never changes the credentials of a channel, so the channel could not connect again after its certificate has
    expired. An existing connection is kept, because TLS checks certificates only in handshakes.

    Args:
        open: function that opens a channel with the given credentials.
    """

    def __init__(self, tls: ClusterTls, open: Callable[[grpc.ChannelCredentials], grpc.aio.Channel]) -> None:
        self._tls = tls
        self._open = open
        self._used = self._open_new(tls.channel_credentials())
        self._replaced: set[_Opened] = set()
        """Replaced channels, each of which is closed when its last call ends."""
        self._closing: set[asyncio.Task[None]] = set()

    def _open_new(self, credentials: grpc.ChannelCredentials) -> _Opened:
        return _Opened(credentials, self._open(credentials))

    def _current(self) -> _Opened:
        credentials = self._tls.channel_credentials()
        if credentials is not self._used.credentials and self.get_state() is not grpc.ChannelConnectivity.READY:
            self._replaced.add(self._used)
            self._close_if_idle(self._used)
            self._used = self._open_new(credentials)
        return self._used

    def _close_if_idle(self, opened: _Opened) -> None:
        if opened in self._replaced and not opened.calls:
            self._replaced.remove(opened)
            closing = asyncio.create_task(opened.channel.close(None))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._method("unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._method("unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._method("stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._method("stream_stream", args, options)

    def _method(self, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
        opened = self._used
        method = getattr(opened.channel, kind)(*args, **options)

        def call(*args_of_call: Any, **options_of_call: Any) -> Any:
            nonlocal opened, method
            if (used := self._current()) is not opened:
                opened, method = used, getattr(used.channel, kind)(*args, **options)
            begun = method(*args_of_call, **options_of_call)
            used.calls += 1
            begun.add_done_callback(lambda _: self._end_call(used))
            return begun

        return call

    def _end_call(self, opened: _Opened) -> None:
        opened.calls -= 1
        self._close_if_idle(opened)

    async def close(self, grace: float | None = None) -> None:
        for opened in [*self._replaced]:  # the end of a call changes the set
            await opened.channel.close(grace)
        await self._used.channel.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._used.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._used.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel.channel_ready()

    async def __aenter__(self) -> TlsChannel:
        return self

    async def __aexit__(self, *args: Any) -> None:
        await self.close()


def tls_problem(details: str) -> str:
    """Return a sentence for the user that explains a TLS failure; "" if a call failed for another reason.

    Args:
        details: gRPC's message about the failed call.
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
