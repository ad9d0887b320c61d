"""The making of a worker in the process of a prefill or decode worker."""

from __future__ import annotations

import asyncio

from paceline.engine.engine import STEPS_IN_FLIGHT
from paceline.engine.loading import Loaded, load
from paceline.services.worker.kv_memory import KVMemory, device_memory
from paceline.services.worker.warm_up import warm_up
from paceline.services.worker.worker import Worker, WorkerLimits
from paceline.services.worker.worker_setup import ArenaPlace, WorkerSetup, max_model_len


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
    limits = WorkerLimits(longest, config.max_batched_tokens, config.max_seqs, steps_in_flight, itl_target)
    worker = Worker(loaded, setup.model_id, setup.role, memory, setup.kv, limits, place.turns)
    await warm_up(worker)
    await worker.load_for(setup.role.name)
    return worker


def _load(setup: WorkerSetup) -> Loaded:
    compute, config = setup.compute, setup.config
    how = config.quantization, config.model_impl, config.trust_remote_code
    return load(setup.folder, compute.dtype, compute.device, compute.kernels, setup.speculative, setup.packed_dir, *how)


def _kv_memory(setup: WorkerSetup, loaded: Loaded, place: ArenaPlace) -> KVMemory:
    config = setup.config
    if not setup.compute.has_pool:
        return KVMemory(loaded.layout, place.arena)
    context_tokens = config.max_model_len or loaded.max_position
    device, size = setup.compute.device, config.kv_pool_memory
    return device_memory(loaded.layout, place.arena, place.path, device, size, context_tokens)
