"""The first steps of a worker, on a request of its own, so that the first client need not wait for lazy setup."""

from __future__ import annotations

import asyncio
import logging
import uuid

from paceline.core.context import Context
from paceline.core.errors import BusyError
from paceline.core.types import Key, SamplingParams
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.proto import common_pb2 as pb
from paceline.services.common.wire import key_to_pb, sampling_to_pb
from paceline.services.worker.worker import Worker

_PROMPT = [0] * 8
"""With its output, the prompt is shorter than a block. So nothing is sealed, and nobody finds it in the cache."""
_TOKENS = 3

log = logging.getLogger(__name__)


async def warm_up(worker: Worker) -> bool:
    """Compute a small request, which records its program and maps weights and buffers. Call before the engine starts.

    The request reserves blocks like any other. Returns False if none are free; then the first request takes longer.
    """
    params = SamplingParams(max_tokens=_TOKENS)
    key = Key(f"warm-up-{uuid.uuid4().hex}", 1, 1)
    prompt, sampling = list(_PROMPT), sampling_to_pb(params)
    work = pb.Work(key=key_to_pb(key), token_ids=prompt, prompt_tokens=len(prompt), sampling=sampling)
    context = Context(prompt)
    try:
        lease = await worker.intake.reserve(work, key, context, len(prompt) + _TOKENS)
    except BusyError as error:
        log.info("not warmed up: %s", error)
        return False
    worker.kv.use(lease.key)
    request = worker.intake.make_request(work, lease, context, None)
    computing = asyncio.create_task(asyncio.to_thread(_compute, worker, request))
    try:
        await asyncio.shield(computing)
    finally:
        await asyncio.wait((computing,))  # even if cancelled: the thread writes to the blocks until then
        worker.kv.release(lease.key)
    return True


def _compute(worker: Worker, request: Request) -> None:
    # A separate scheduler, so that these steps do not count in the figures by which the engine plans.
    scheduler = Scheduler(worker.engine_limits, pool=worker.memory.compute_pool())
    scheduler.add(request)
    while (step := scheduler.plan()) is not None:
        scheduler.apply(step, worker.runner.execute(step))
