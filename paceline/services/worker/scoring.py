"""Logprobs of a prompt's tokens, without any new token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from paceline.core.errors import InvalidRequestError
from paceline.engine.step import Sampled, Scored
from paceline.proto import common_pb2, worker_pb2
from paceline.services.common.wire import context_from_pb, key_from_pb, key_to_pb, scores_to_pb
from paceline.services.worker.event_stream import EventStream
from paceline.services.worker.reports import Reporter
from paceline.services.worker.worker import Worker


async def score(
    worker: Worker, work: common_pb2.Work, send: Callable[[worker_pb2.ComputeEvent], Awaitable[None]]
) -> None:
    """Compute the context in blocks that this worker reserves, and send the logprobs as they come.

    Raises:
        InvalidRequestError: the work does not ask for logprobs of the prompt.
        BusyError: there are not enough free blocks.
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
                if isinstance(event, Scored):
                    for scores in scores_to_pb(event.first, event.tokens):
                        await send(worker_pb2.ComputeEvent(prompt_logprobs=scores))
            if (report := reporter.take()) is not None or (not batch and worker.goes_on):
                await send(worker_pb2.ComputeEvent(alive=common_pb2.Alive(), report=report))
            if any(isinstance(event, Sampled) for event in batch):
                return
    finally:
        worker.retire(lease.key)
