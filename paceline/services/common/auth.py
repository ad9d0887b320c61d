"""The cluster's secret on every gRPC call: servers require it and channels send it, for all methods alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from paceline.services.common.secret import Secret

_KEY = "authorization"
_SCHEME = "Bearer "
REFUSAL = (
    "the caller does not have the secret of this service; start both with the same --auth-token-file, "
    "and restart the one that has an older secret"
)


class RequireSecret(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """An interceptor that ends every call without the secret with UNAUTHENTICATED, before any message is read.

    This includes health checks and calls of methods that do not exist.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        # Handlers of this kind begin before a message has come; all other kinds wait for one.
        self._refuse = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        given = [value for key, value in handler_call_details.invocation_metadata or () if key == _KEY]
        if len(given) == 1 and self._knows(given[0]):
            return await continuation(handler_call_details)
        return self._refuse

    def _knows(self, given: str | bytes) -> bool:
        return isinstance(given, str) and given.startswith(_SCHEME) and self._secret.matches(given[len(_SCHEME) :])


async def _refuse(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)


class ChannelWithSecret(grpc.aio.Channel):
    """A channel that wraps another one and sends the secret with every call.

    A gRPC interceptor is not used, because it replaces the channel's calls with its own, which end and are cancelled
    differently.
    """

    def __init__(self, channel: grpc.aio.Channel, secret: Secret) -> None:
        self._channel = channel
        self._own = ((_KEY, _SCHEME + secret.reveal()),)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._with_secret(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._with_secret(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._with_secret(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._with_secret(self._channel.stream_stream(*args, **options))

    def _with_secret(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = (), **options: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), *self._own), **options)

        return call

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> ChannelWithSecret:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *args: Any) -> None:
        await self._channel.__aexit__(*args)
