"""The first steps of a worker, for nobody: what is made lazily is there when the first request comes."""

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
"""With its output shorter than a block: nothing is sealed, so nobody will find it in the cache."""
_TOKENS = 3

log = logging.getLogger(__name__)


async def warm_up(worker: Worker) -> bool:
    """Computes a small request: its program is recorded, weights and buffers are mapped. Before the engine starts.

    It has blocks of its own, as any request. Returns False where there are none: then the first request takes longer.
    """
    params = SamplingParams(max_tokens=_TOKENS)
    key = Key(f"warm-up-{uuid.uuid4().hex}", 1, 1)
    prompt, sampling = list(_PROMPT), sampling_to_pb(params)
    work = pb.Work(key=key_to_pb(key), token_ids=prompt, prompt_tokens=len(prompt), sampling=sampling)
    context = Context(prompt)
    try:
        lease = await worker.reserve(work, key, context, len(prompt) + _TOKENS)
    except BusyError as error:
        log.info("not warmed up: %s", error)
        return False
    worker.kv.use(lease.key)
    request = worker.make_request(work, lease, context, None)
    computing = asyncio.create_task(asyncio.to_thread(_compute, worker, request))
    try:
        await asyncio.shield(computing)
    finally:
        await asyncio.wait((computing,))  # where this was cancelled: until then its blocks are written to
        worker.kv.release(lease.key)
    return True


def _compute(worker: Worker, request: Request) -> None:
    # Apart from the engine's own figures, by which it plans.
    scheduler = Scheduler(worker.engine_limits, pool=worker.memory.compute_pool())
    scheduler.add(request)
    while (step := scheduler.plan()) is not None:
        scheduler.apply(step, worker.runner.execute(step))
