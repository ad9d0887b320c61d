"""The making of a worker in the process of a prefill or decode worker, and its first steps."""

from __future__ import annotations

import asyncio
import logging
import uuid

from paceline.core.adapters import adapter_folders
from paceline.core.config import quantization_of
from paceline.core.context import Context
from paceline.core.errors import BusyError
from paceline.core.pooling_choice import pooling_choice
from paceline.core.types import Key, SamplingParams
from paceline.engine.engine import STEPS_IN_FLIGHT
from paceline.engine.loading import Loaded, load
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.models.pooling.causal import load_pooler
from paceline.proto import common_pb2 as pb
from paceline.services.common.wire import key_to_pb, sampling_to_pb
from paceline.services.worker.kv_memory import KVMemory, device_memory
from paceline.services.worker.worker import Worker, WorkerLimits
from paceline.services.worker.worker_setup import ArenaPlace, WorkerSetup, max_model_len

_PROMPT = [0] * 8
"""Token ids of the request that warms a worker up. With its output, this request is shorter than a block. So no block
is sealed, and no other request finds it in the cache.
"""
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
    intake = worker.intake
    if worker.only_pools:
        request = intake.make_pool_request(work, lease, context, "last")
    else:
        request = intake.make_request(work, lease, context, None)
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


async def make_worker(setup: WorkerSetup) -> Worker:
    """Load the model, join the arena and return the worker, warmed up. Raises PacelineError."""
    config = setup.config
    loaded = await asyncio.to_thread(_load, setup)
    place = await setup.join(loaded.layout, loaded.max_position)
    memory = _kv_memory(setup, loaded, place)
    setup.undo.callback(memory.close)
    longest = max_model_len(config, loaded.layout, loaded.max_position, place.slots, memory.slots)
    steps_in_flight = STEPS_IN_FLIGHT if config.async_scheduling else 1
    itl_target = config.itl_target_ms / 1000 or None
    sizes = longest, config.max_batched_tokens, config.max_seqs
    limits = WorkerLimits(*sizes, steps_in_flight, itl_target, config.max_adapters)
    how = loaded.model.config.bidirectional, pooling_choice(config)
    pooler = await asyncio.to_thread(load_pooler, setup.folder, *how)
    worker = Worker(
        loaded, setup.model_id, setup.role, memory, setup.kv, limits, place.turns, pooler, setup.weight_maps
    )
    await asyncio.to_thread(worker.adapters.check, adapter_folders(config).values())
    await warm_up(worker)
    await worker.load_for(setup.role.name)
    return worker


def _load(setup: WorkerSetup) -> Loaded:
    compute, config = setup.compute, setup.config
    how = quantization_of(config), config.model_impl, config.trust_remote_code, config.kv_coding, setup.adapters
    return load(setup.folder, compute.dtype, compute.device, compute.kernels, setup.speculative, setup.packed_dir, *how)


def _kv_memory(setup: WorkerSetup, loaded: Loaded, place: ArenaPlace) -> KVMemory:
    config = setup.config
    if not setup.compute.has_pool:
        return KVMemory(loaded.layout, place.arena)
    context_tokens = config.max_model_len or loaded.max_position
    device, size = setup.compute.device, config.kv_pool_memory
    return device_memory(loaded.layout, place.arena, place.path, device, size, context_tokens)
