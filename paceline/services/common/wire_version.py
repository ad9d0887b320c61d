"""The version of the messages between services, which both sides check before they work together.

The version covers gRPC messages, messages on Unix sockets, members in Redis, and the page of an arena in which workers
take turns. The layout of KV blocks and numerics are compared separately. Each release speaks a range of versions, and
two services understand each other if their ranges overlap. A field or a method that the other side may ignore needs no
new version. A change that older releases would misunderstand needs a new version: raise `newest`, keep speaking the
previous version for at least one release, and then raise `oldest`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, NoReturn

import grpc
import grpc.aio

from paceline.proto import common_pb2

HEADER = "paceline-wire"
"""Key of the metadata entry of each call that contains the caller's range of versions, such as "1-2"."""

_RANGE = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")

INCOMPATIBLE = (HEADER, "incompatible")
"""Trailing metadata entry of a call that was refused because of its caller's versions."""
_HEALTH = "/grpc.health.v1.Health/"


class WireVersions(NamedTuple):
    """The range of versions that a release speaks, from `oldest` to `newest`, both included."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"{self.oldest}-{self.newest}"

    def overlaps(self, other: WireVersions) -> bool:
        return self.oldest <= other.newest and other.oldest <= self.newest

    def to_pb(self) -> common_pb2.WireVersions:
        return common_pb2.WireVersions(oldest=self.oldest, newest=self.newest)

    @staticmethod
    def from_pb(message: common_pb2.WireVersions) -> WireVersions:
        return WireVersions(message.oldest, message.newest) if message.newest else UNNAMED

    @staticmethod
    def parse(text: str | bytes | None) -> WireVersions | None:
        """Parse the range of versions in a call's metadata; None if the text is no range."""
        if text is None:
            return UNNAMED
        found = _RANGE.fullmatch(text) if isinstance(text, str) else None
        return None if found is None else WireVersions(int(found[1]), int(found[2]))


OURS = WireVersions(1, 1)
"""Versions that this release speaks."""
UNNAMED = WireVersions(1, 1)
"""Versions that a release is assumed to speak if it names none."""


def mismatch(who: str, theirs: WireVersions, ours: WireVersions = OURS) -> str:
    """Return a message that says why two services cannot work together, and what to do; "" if they can.

    Args:
        who: name of the other service, for the message.
        theirs: versions that the other service speaks.
    """
    if ours.overlaps(theirs):
        return ""
    older = "this service" if ours.newest < theirs.newest else who
    return (
        f"{who} speaks versions {theirs} of the protocol between services and this service {ours}: update {older}, or "
        "first bring all services to a release in between"
    )


class RequireWire(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """An interceptor that ends calls from services that speak none of our versions with FAILED_PRECONDITION.

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
