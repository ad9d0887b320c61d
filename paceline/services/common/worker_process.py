"""A prefill or decode worker as a process: load, join the arena, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import torch

from paceline.core.config import WorkerConfig
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.kv_layout import KVLayout, make_layout
from paceline.kernels import select_kernels
from paceline.models.base import Model
from paceline.models.config import read_config
from paceline.models.identity import model_identity
from paceline.models.loader import load_model
from paceline.services.common.arena_map import map_arena
from paceline.services.common.kv_client import Arena, KVClient
from paceline.services.common.lifecycle import announce_ready, reachable_address, stop_on_signals, unique_name
from paceline.services.common.registry import Member, Registrar, Role
from paceline.services.common.rpc import RpcServer
from paceline.services.common.worker import Worker, WorkerLimits

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


async def run_worker(config: WorkerConfig, role: Role, add_service: Callable[[grpc.aio.Server, Worker], None]) -> None:
    """Serves until SIGTERM, then drains. Raises PacelineError where the worker cannot start or go on."""
    stop = stop_on_signals()
    worker_id = config.worker_id or unique_name(role)
    server = RpcServer(config.host, config.port)
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    model, layout = await asyncio.to_thread(_load, config)
    lost = asyncio.Event()
    kv = KVClient(config.kvtransfer, worker_id, role, on_lost=lost.set)
    arena = await kv.attach(layout)
    pool = torch.frombuffer(map_arena(arena.path, arena.size), dtype=_dtype(config))
    limits = WorkerLimits(_max_model_len(config, model, layout, arena), config.max_batched_tokens, config.max_seqs)
    worker = Worker(model, layout, pool, kv, limits)
    worker.engine.start()
    add_service(server.server, worker)
    address = reachable_address(config, await server.start())
    epoch = time.time_ns()
    registrar = Registrar(
        config.redis, config.cluster, lambda: _describe(worker, worker_id, role, epoch, address, arena.host_id)
    )
    await registrar.start()
    await server.set_ready(True)
    announce_ready(config, address)
    log.info("%s %s serves at %s", role, worker_id, address)
    try:
        await _until(stop, lost, worker.failed)
        await _drain(worker, server, registrar, config.drain_seconds)
    finally:
        await registrar.stop()
        await server.close(0)
        await asyncio.to_thread(worker.engine.stop)
        await kv.close()


async def _until(stop: asyncio.Event, lost: asyncio.Event, failed: asyncio.Future[None]) -> None:
    """Returns when the process shall stop; raises when it cannot go on."""
    waits = [asyncio.create_task(event.wait()) for event in (stop, lost)]
    ends: list[asyncio.Future[Any]] = [*waits, failed]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        if lost.is_set() and not stop.is_set():
            # The blocks are gone with their owner. A fresh process is the simplest way back to a clean state.
            raise UnavailableError("the kvtransfer service of this host went away")
    finally:
        for wait in waits:
            wait.cancel()


async def _drain(worker: Worker, server: RpcServer, registrar: Registrar, seconds: float) -> None:
    """No new work; time for what runs."""
    worker.draining = True
    await server.set_ready(False)
    registrar.announce()
    await worker.drain(seconds)


def _load(config: WorkerConfig) -> tuple[Model, KVLayout]:
    if config.device != "cpu":
        raise ConfigError(f"--device {config.device} is not supported yet; use cpu")
    if not config.model:
        raise ConfigError("no model; name the folder of one")
    folder, device, dtype = Path(config.model), torch.device(config.device), _dtype(config)
    model = load_model(folder, dtype, select_kernels(device, config.kernels), device)
    return model, make_layout(model.group_shapes, dtype.itemsize, model_identity(folder, str(dtype)))


def _dtype(config: WorkerConfig) -> torch.dtype:
    name = read_config(Path(config.model)).dtype if config.dtype == "auto" else config.dtype
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name} is not supported; choose one with --dtype {' or --dtype '.join(_DTYPES)}")
    return _DTYPES[name]


def _max_model_len(config: WorkerConfig, model: Model, layout: KVLayout, arena: Arena) -> int:
    """The longest context that the model, the arena and the user allow."""
    wanted = config.max_model_len or model.config.max_position
    if wanted > model.config.max_position:
        raise ConfigError(f"--max-model-len {wanted} is more than the model's {model.config.max_position}")
    fitting = wanted
    while layout.slots_for(fitting) > arena.slots:
        fitting -= layout.alignment
    if fitting < layout.alignment or (config.max_model_len and fitting < wanted):
        raise ConfigError(
            f"the KV memory has room for one context of {max(fitting, 0)} tokens, not {wanted}; "
            "raise --kv-memory or lower --max-model-len"
        )
    return fitting


def _describe(worker: Worker, worker_id: str, role: Role, epoch: int, address: str, host_id: str) -> Member:
    stats = worker.engine.stats
    return Member(
        worker_id=worker_id,
        role=role,
        epoch=epoch,
        address=address,
        host_id=host_id,
        state="draining" if worker.draining else "ready",
        model=worker.layout.fingerprint,
        max_model_len=worker.limits.max_model_len,
        max_seqs=worker.limits.max_seqs,
        running=worker.active,
        stats={
            "steps": stats.steps,
            "computed_tokens": stats.computed_tokens,
            "sampled_tokens": stats.sampled_tokens,
            "preemptions": stats.preemptions,
            "busy_seconds": worker.engine.busy_seconds,
        },
    )
