"""The service for work that needs no decoding. Each kind of work has one handler."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol, TypeAlias

import grpc.aio

from paceline.core.errors import InvalidRequestError
from paceline.core.telemetry import carrier_of, request_span
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc_errors import mapped_errors
from paceline.services.worker.scoring import score
from paceline.services.worker.worker import Worker

Kind: TypeAlias = common_pb2.WorkKind.ValueType
Send = Callable[[worker_pb2.ComputeEvent], Awaitable[None]]
Handler = Callable[[common_pb2.Work, Send], Awaitable[None]]
"""A function that does the work and sends its events, `Opened` first. The service sends `Computed` after it returns."""

CallContext = grpc.aio.ServicerContext[common_pb2.Work, worker_pb2.ComputeEvent]


class ComputingWorker(Protocol):
    """The part of a worker that the service needs."""

    def admit(self, work: common_pb2.Work) -> contextlib.AbstractAsyncContextManager[None]:
        """Count the work while a `with` statement runs. Raises BusyError or UnavailableError."""

    def check(self, work: common_pb2.Work) -> None:
        """Refuse work that this worker can never do. Raises InvalidRequestError or UnavailableError."""


def handlers_of(worker: Worker) -> Mapping[Kind, Handler]:
    """Return the handlers of a prefill or decode worker, by the kind of work."""
    handlers: dict[Kind, Handler] = {common_pb2.WORK_KIND_SCORE: partial(score, worker)}
    if worker.encoding is not None:
        handlers[common_pb2.WORK_KIND_ENCODE] = worker.encoding.serve
    return handlers


class ComputeService(worker_pb2_grpc.ComputeServicer):
    """Serves `Compute` with one worker."""

    def __init__(self, worker: ComputingWorker, handlers: Mapping[Kind, Handler]) -> None:
        self._worker = worker
        self._handlers = handlers

    async def Run(self, work: common_pb2.Work, context: CallContext) -> None:  # type: ignore[override]
        # Writing to the context, rather than yielding, lets a cancellation arrive wherever this waits.
        with request_span("compute", work.key.request_id, carrier_of(context.invocation_metadata())):
            async with mapped_errors(context), self._worker.admit(work):
                if (handler := self._handlers.get(work.kind)) is None:
                    raise InvalidRequestError(f"this worker does not know work of kind {work.kind}")
                self._worker.check(work)
                await handler(work, context.write)
                await context.write(worker_pb2.ComputeEvent(computed=worker_pb2.Computed()))
