"""The prefill service: computes a prompt in blocks that a decode worker reserved, and samples the first token."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

import grpc.aio

from paceline.core.errors import InvalidRequestError
from paceline.core.telemetry import carrier_of, request_span
from paceline.engine.constraint import Grammar
from paceline.engine.step import Filled, Sampled, Scored
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc_errors import mapped_errors
from paceline.services.common.wire import (
    context_from_pb,
    key_from_pb,
    key_to_pb,
    reason_to_pb,
    scores_to_pb,
    token_to_pb,
)
from paceline.services.worker.event_stream import EventStream, Reporter, RequestEvent
from paceline.services.worker.leases import Reservation
from paceline.services.worker.worker import Worker

log = logging.getLogger(__name__)

CallContext = grpc.aio.ServicerContext[worker_pb2.PrefillRequest, worker_pb2.PrefillEvent]


class PrefillService(worker_pb2_grpc.PrefillServicer):
    """The gRPC service `Prefill` of one worker, through which gateways let it compute prompts."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Run(self, request: worker_pb2.PrefillRequest, context: CallContext) -> None:  # type: ignore[override]
        # Writing to the context, rather than yielding, lets a cancellation arrive wherever this waits.
        work = request.work
        carrier = carrier_of(context.invocation_metadata())
        with request_span("prefill", work.key.request_id, carrier):
            left = context.time_remaining()
            async with mapped_errors(context), self._worker.admit(work, "prefill", left):
                self._worker.check(work)
                async with self._worker.intake.compiling(work) as compiled:
                    await self._prefill(request, compiled, context)

    async def _prefill(
        self, request: worker_pb2.PrefillRequest, compiled: Awaitable[Grammar | None], context: CallContext
    ) -> None:
        """Compute the context and send events. The last event has the key under which decode can adopt the blocks."""
        worker, work = self._worker, request.work
        reservation, prefix_came = await self._open(request)
        try:
            worker.media.open(work, reservation.filled_tokens)
            opened = worker_pb2.Opened(
                key=key_to_pb(reservation.key),
                source=worker.kv.session.source,
                cached_tokens=reservation.filled_tokens,
                prefix_failed=not prefix_came,
            )
            await context.write(worker_pb2.PrefillEvent(opened=opened))
            spare: list[int] = []
            if work.kept_tokens < len(work.token_ids):  # otherwise the decode worker copies the blocks
                spare = await worker.intake.reserve_spare(work, reservation)
            computed = worker.intake.make_request(
                work,
                reservation,
                context_from_pb(work),
                await compiled,
                only_first_token=True,
                has_readers=request.host_id != worker.kv.session.host_id,
                spare=spare,
            )
            if computed.capacity < len(work.token_ids):  # otherwise the request would wait for blocks that nobody adds
                raise InvalidRequestError(
                    f"the blocks have room for {computed.capacity} tokens, the context has {len(work.token_ids)}"
                )
            events, reporter = EventStream(), Reporter()
            worker.submit(computed, events)
            while True:
                batch = await events.batch()
                reporter.note(batch)
                await self._report_scores(batch, context)
                if event := next((event for event in batch if isinstance(event, Sampled)), None):
                    break
                if (report := reporter.take()) is not None or (not batch and worker.goes_on):
                    await context.write(worker_pb2.PrefillEvent(alive=common_pb2.Alive(), report=report))
            first = worker_pb2.FirstToken(token=token_to_pb(event.token), finish_reason=reason_to_pb(event.reason))
            # The token goes to the client now. The blocks go to the decode worker through kvtransfer.
            await context.write(worker_pb2.PrefillEvent(first_token=first, report=reporter.take()))
            if event.reason is not None:
                worker.retire(reservation.key)
                return
            while not any(isinstance(event, Filled) for event in batch):
                batch = await events.batch()
            log.info("prefilled %d tokens", len(work.token_ids), extra={"sealed_at": events.sealed_at})
        except BaseException:
            worker.retire(reservation.key)
            raise
        worker.forget(reservation.key)
        await context.write(worker_pb2.PrefillEvent(filled=worker_pb2.Filled(key=key_to_pb(reservation.key))))

    async def _open(self, request: worker_pb2.PrefillRequest) -> tuple[Reservation, bool]:
        """Open the blocks to write.

        On the decode worker's host these are the blocks that it reserved. Otherwise reserve blocks on this host, which
        the decode worker's host fetches. Return the reservation, and whether a requested prefix came from another host
        (True if none was requested).
        """
        worker, work, key = self._worker, request.work, key_from_pb(request.work.key)
        if request.host_id == worker.kv.session.host_id:
            return await worker.kv.open(key), True
        context = context_from_pb(work)
        prefix_came = await worker.intake.fetch_prefix(work, key, context, work.prefix_source)
        reservation = await worker.intake.reserve(work, key, context, len(context))
        try:
            return await worker.kv.open(reservation.key), prefix_came
        except BaseException:
            worker.kv.release(reservation.key)
            raise

    async def _report_scores(self, batch: list[RequestEvent], context: CallContext) -> None:
        for event in batch:
            if isinstance(event, Scored):
                for scores in scores_to_pb(event.first, event.tokens):
                    await context.write(worker_pb2.PrefillEvent(prompt_logprobs=scores))
