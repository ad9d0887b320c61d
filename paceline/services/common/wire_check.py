"""The check of a caller's protocol versions, before any message of its call is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from paceline.services.common.wire_version import HEADER, WireVersions, mismatch

INCOMPATIBLE = (HEADER, "incompatible")
"""Trailing metadata of a call that was refused for its caller's versions."""
_HEALTH = "/grpc.health.v1.Health/"


class RequireWire(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """An interceptor that ends calls of services that speak none of our versions with FAILED_PRECONDITION.

    Health checks pass, because orchestrators send them, too.
    """

    def __init__(self, ours: WireVersions) -> None:
        self._ours = ours

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        metadata = dict(handler_call_details.invocation_metadata or ())
        theirs = WireVersions.parse(metadata.get(HEADER))
        if handler_call_details.method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        problem = f"{HEADER} is no range of versions" if theirs is None else mismatch("the caller", theirs, self._ours)
        return _refusal(problem) if problem else await continuation(handler_call_details)


def _refusal(problem: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem, (INCOMPATIBLE,))

    # Handlers of this kind begin before a message has come; all other kinds wait for one.
    return grpc.stream_stream_rpc_method_handler(refuse)
