"""The prefill service: turns a prompt into KV blocks that a decode worker has reserved, and samples the first token."""

from __future__ import annotations

import logging

import grpc.aio

from paceline.core.telemetry import carrier_of, request_span
from paceline.engine.step import Sampled, Scored
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.event_stream import RequestEvent
from paceline.services.common.reports import Reporter
from paceline.services.common.rpc import mapped_errors
from paceline.services.common.wire import key_from_pb, key_to_pb, reason_to_pb, scores_to_pb, token_to_pb
from paceline.services.common.worker import Worker

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[worker_pb2.PrefillRequest, worker_pb2.PrefillEvent]


class PrefillService(worker_pb2_grpc.PrefillServicer):
    """Serves `Prefill` with one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Run(self, request: worker_pb2.PrefillRequest, context: Context) -> None:  # type: ignore[override]
        # Writing to the context, rather than yielding, lets a cancellation arrive wherever this waits.
        work = request.work
        carrier = carrier_of(context.invocation_metadata())
        with request_span("prefill", work.key.request_id, carrier):
            async with mapped_errors(context):
                with self._worker.admission():
                    self._worker.check(work)
                    await self._prefill(work, context)
                    log.info("prefilled %d tokens", len(work.token_ids))

    async def _prefill(self, work: common_pb2.Work, context: Context) -> None:
        """Computes the context, reports on the way, and ends with the key under which the blocks can be adopted."""
        worker = self._worker
        matcher = await worker.matcher(work)
        hold = await worker.kv.open(key_from_pb(work.key))
        try:
            await context.write(worker_pb2.PrefillEvent(alive=common_pb2.Alive()))
            request = worker.make_request(work, hold, list(work.token_ids), matcher, only_first_token=True)
            events, reporter = worker.submit(request), Reporter()
            while True:
                batch = await events.batch()
                reporter.note(batch)
                await self._report_scores(batch, context)
                if batch and isinstance(event := batch[-1], Sampled):
                    break
                if (report := reporter.take()) is not None or (not batch and worker.goes_on):
                    await context.write(worker_pb2.PrefillEvent(alive=common_pb2.Alive(), report=report))
            # The client gets its first token now; the handoff follows behind it.
            first = worker_pb2.FirstToken(token=token_to_pb(event.token), finish_reason=reason_to_pb(event.reason))
            await context.write(worker_pb2.PrefillEvent(first_token=first, report=reporter.take()))
            if event.reason is not None:
                worker.retire(hold.key)
                return
            key = (await worker.kv.fill(hold.key, len(work.token_ids))).key
        except BaseException:
            worker.retire(hold.key)
            raise
        worker.forget(hold.key)
        await context.write(worker_pb2.PrefillEvent(filled=worker_pb2.Filled(key=key_to_pb(key))))

    async def _report_scores(self, batch: list[RequestEvent], context: Context) -> None:
        for event in batch:
            if isinstance(event, Scored):
                scores = scores_to_pb(event.first, event.tokens)
                await context.write(worker_pb2.PrefillEvent(prompt_logprobs=scores))
