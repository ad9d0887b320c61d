"""The service for work that needs no decoding. Each kind of work has one handler."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol, TypeAlias

import grpc.aio

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.core.telemetry import carrier_of, request_span
from paceline.engine.step import Preempted, Sampled, Scored
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc_errors import mapped_errors
from paceline.services.common.wire import context_from_pb, key_from_pb, key_to_pb, scores_to_pb
from paceline.services.worker.event_stream import EventStream, Reporter
from paceline.services.worker.pooling import PoolHandler
from paceline.services.worker.worker import Worker

Kind: TypeAlias = common_pb2.WorkKind.ValueType
Send = Callable[[worker_pb2.ComputeEvent], Awaitable[None]]
Handler = Callable[[common_pb2.Work, Send], Awaitable[None]]
"""A function that does the work and sends its events, `Opened` first. The service sends `Computed` after it returns."""

CallContext = grpc.aio.ServicerContext[common_pb2.Work, worker_pb2.ComputeEvent]


async def score(
    worker: Worker, work: common_pb2.Work, send: Callable[[worker_pb2.ComputeEvent], Awaitable[None]]
) -> None:
    """Compute the context in blocks that this worker reserves, and send the logprobs as they come.

    Raises:
        InvalidRequestError: the work does not ask for logprobs of the prompt.
        BusyError: there are not enough free blocks.
        UnavailableError: the work was preempted, because a request that decodes here needs its blocks.
    """
    if not work.sampling.HasField("prompt_logprobs"):
        raise InvalidRequestError("work of the kind SCORE must say how many prompt_logprobs it wants")
    # The engine ends a request with its first token. This token is not sent.
    work.sampling.max_tokens = 1
    context = context_from_pb(work)
    lease = await worker.intake.reserve(work, key_from_pb(work.key), context, len(context))
    try:
        worker.media.open(work, lease.filled_tokens)
        opened = worker_pb2.Opened(key=key_to_pb(lease.key), cached_tokens=lease.filled_tokens)
        await send(worker_pb2.ComputeEvent(opened=opened))
        events, reporter = EventStream(), Reporter()
        worker.submit(worker.intake.make_request(work, lease, context, None, only_first_token=True), events)
        while True:
            batch = await events.batch()
            reporter.note(batch)
            for event in batch:
                if isinstance(event, Preempted):
                    raise UnavailableError("the worker needs the memory of this prompt for requests that it answers")
                if isinstance(event, Scored):
                    for scores in scores_to_pb(event.first, event.tokens):
                        await send(worker_pb2.ComputeEvent(prompt_logprobs=scores))
            if (report := reporter.take()) is not None or (not batch and worker.goes_on):
                await send(worker_pb2.ComputeEvent(alive=common_pb2.Alive(), report=report))
            if any(isinstance(event, Sampled) for event in batch):
                return
    finally:
        worker.retire(lease.key)


class ComputingWorker(Protocol):
    """The part of a worker that the service needs."""

    def admit(self, work: common_pb2.Work) -> contextlib.AbstractAsyncContextManager[None]:
        """Count the work as running for the body of a `with` statement. Raises BusyError or UnavailableError."""

    def check(self, work: common_pb2.Work) -> None:
        """Refuse work that this worker can never do. Raises InvalidRequestError or UnavailableError."""


def handlers_of(worker: Worker) -> Mapping[Kind, Handler]:
    """Return the handlers of a prefill or decode worker, by the kind of work."""
    handlers: dict[Kind, Handler] = {common_pb2.WORK_KIND_SCORE: partial(score, worker)}
    if worker.pooler is not None:
        handlers[common_pb2.WORK_KIND_POOL] = PoolHandler(worker, worker.pooler, worker.limits.max_seqs).serve
    if worker.encoding is not None:
        handlers[common_pb2.WORK_KIND_ENCODE] = worker.encoding.serve
    return handlers


class ComputeService(worker_pb2_grpc.ComputeServicer):
    """The gRPC service `Compute` of one worker, for scores and encodings."""

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
