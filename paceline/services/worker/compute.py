"""The service for work that needs no decoding. Each kind of work has one handler in `HANDLERS`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc.aio

from paceline.core.errors import InvalidRequestError
from paceline.core.telemetry import carrier_of, request_span
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc import mapped_errors
from paceline.services.worker.scoring import score
from paceline.services.worker.worker import Worker

Send = Callable[[worker_pb2.ComputeEvent], Awaitable[None]]
Handler = Callable[[Worker, common_pb2.Work, Send], Awaitable[None]]
"""A function that does the work and sends its events, `Opened` first. The service sends `Computed` after it returns."""

HANDLERS: dict[common_pb2.WorkKind.ValueType, Handler] = {common_pb2.WORK_KIND_SCORE: score}

CallContext = grpc.aio.ServicerContext[common_pb2.Work, worker_pb2.ComputeEvent]


class ComputeService(worker_pb2_grpc.ComputeServicer):
    """Serves `Compute` with one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Run(self, work: common_pb2.Work, context: CallContext) -> None:  # type: ignore[override]
        # Writing to the context, rather than yielding, lets a cancellation arrive wherever this waits.
        with request_span("compute", work.key.request_id, carrier_of(context.invocation_metadata())):
            async with mapped_errors(context), self._worker.admission.admit():
                if (handler := HANDLERS.get(work.kind)) is None:
                    raise InvalidRequestError(f"Compute.Run does not know work of kind {work.kind}")
                self._worker.check(work)
                await handler(self._worker, work, context.write)
                await context.write(worker_pb2.ComputeEvent(computed=worker_pb2.Computed()))
