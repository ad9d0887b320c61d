"""Metadata that a gRPC channel sends with every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from paceline.services.common.auth import Prover


class ChannelWithMetadata(grpc.aio.Channel):
    """A channel that wraps another one and sends metadata of its own with every call.

    A gRPC interceptor is not used, because it replaces the channel's calls with its own, which end and are cancelled
    differently.

    Args:
        same: metadata that are the same for all calls.
        prover: makes the proof of each call; None if there is no secret.
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
