"""The cluster's secret on every gRPC call: servers require it, for all methods alike."""

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


def secret_header(secret: Secret) -> tuple[str, str]:
    """Return the metadata that a call needs where this secret is required."""
    return _KEY, _SCHEME + secret.reveal()


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
