"""Conversion of Paceline's errors to gRPC status codes, and back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from paceline.core.errors import (
    BusyError,
    DrainingError,
    InvalidRequestError,
    PacelineError,
    RefusedError,
    StaleError,
    TransferError,
    UnavailableError,
    UntrustedError,
)
from paceline.services.common.auth import SKEWED
from paceline.services.common.tls_channel import tls_problem
from paceline.services.common.wire_version import INCOMPATIBLE

log = logging.getLogger(__name__)

_CODES: tuple[tuple[type[PacelineError], grpc.StatusCode], ...] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (BusyError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (StaleError, grpc.StatusCode.ABORTED),
    (TransferError, grpc.StatusCode.DATA_LOSS),
    (PacelineError, grpc.StatusCode.FAILED_PRECONDITION),
)

_PARAM = "paceline-param"
"""Key of the trailing metadata entry that names the invalid field in an error with the status INVALID_ARGUMENT."""
_DRAINING = "paceline-draining"
"""Key of the trailing metadata entry that marks a draining worker. A failed one has the status UNAVAILABLE, too."""

_OURS = ("paceline-error", "1")
"""Trailing metadata entry of errors that come from a service. Errors without this entry come from gRPC itself."""

_GRPC_SAYS = {
    grpc.StatusCode.UNAVAILABLE: "has ended or cannot be reached",
    grpc.StatusCode.CANCELLED: "cancelled the call",
    grpc.StatusCode.DEADLINE_EXCEEDED: "did not answer in time",
    grpc.StatusCode.UNIMPLEMENTED: "does not know this call; is it of an older release?",
}
"""Explanations of gRPC's own errors, which callers get because gRPC's messages are about addresses and sockets."""


@contextlib.asynccontextmanager
async def mapped_errors(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:  # type: ignore[type-arg]
    """Convert errors in a servicer to status codes. Unexpected errors are logged and become INTERNAL."""
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
    """Yield the details of an error that a status code cannot express, as trailing metadata."""
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
    """Convert a gRPC error that a caller has received to our error.

    Args:
        who: name of the called service, for the message.
    """
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
    if SKEWED in metadata:
        return UntrustedError(f"{who} refuses us: {details}")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED or INCOMPATIBLE in metadata:
        return RefusedError(f"{who} refuses us: {details}")
    if problem := tls_problem(details):
        return UntrustedError(f"no connection to {who} can be trusted: {problem} ({details})")
    if _OURS in metadata:
        return UnavailableError(f"{who}: {details}")
    return UnavailableError(f"{who} {_GRPC_SAYS.get(error.code(), 'failed with an unexpected error; its log has it')}")
