"""The process of a prefill or decode worker: load the model, join the arena, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import torch

from paceline.core.config import WorkerConfig
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.machine import available_cores
from paceline.core.model_folder import model_digest
from paceline.core.numerics import Numerics
from paceline.core.speculative import parse_speculative_config
from paceline.core.turns import DecodeTurns, PrefillTurns, Turns
from paceline.engine.engine import STEPS_IN_FLIGHT
from paceline.engine.loading import Loaded, load
from paceline.proto.worker_pb2_grpc import add_ComputeServicer_to_server, add_MaintenanceServicer_to_server
from paceline.services.common.lifecycle import (
    announce_ready,
    reachable_address,
    start_unless_stopped,
    stop_on_signals,
    unique_name,
)
from paceline.services.common.registry import Member, Registrar, Role, metrics_to_pb
from paceline.services.common.rpc import RpcServer
from paceline.services.common.secret import read_secret
from paceline.services.common.unix_socket import Framed, UnixListener
from paceline.services.worker.compute import ComputeService
from paceline.services.worker.compute_options import ComputeOptions
from paceline.services.worker.kv_client import KVClient
from paceline.services.worker.kv_memory import KVMemory, device_memory
from paceline.services.worker.maintenance import MaintenanceService
from paceline.services.worker.warm_up import warm_up
from paceline.services.worker.worker import Worker, WorkerLimits

log = logging.getLogger(__name__)

AddService = Callable[[grpc.aio.Server, Worker], Callable[[], Framed] | None]
"""A function that adds a service to the server. It returns a factory for connections of the service's Unix socket on
this host; None if the service has no such socket."""


async def run_worker(config: WorkerConfig, role: Role, add_service: AddService) -> None:
    """Serve until SIGTERM, then drain. Raises PacelineError if the worker cannot start or go on."""
    stop = stop_on_signals()
    process = await start_unless_stopped(WorkerProcess.start(config, role, add_service), stop)
    announce_ready(config, process.address)
    log.info("%s %s serves at %s, computes with %s", role, process.worker_id, process.address, process.numerics)
    try:
        await process.wait(stop)
        await process.drain(config.drain_seconds)
    finally:
        await process.close()


class WorkerProcess:
    """A worker with its server, its session with kvtransfer and its membership in the cluster."""

    def __init__(self, config: WorkerConfig, role: Role) -> None:
        self.worker_id = config.worker_id
        self.address = ""
        self.socket = ""
        """Path of the Unix socket for gateways on this host; empty if the service has none."""
        self.numerics: Numerics | None = None
        """None until the options are resolved."""
        self._config = config
        self._role = role
        self._secret = read_secret(config.auth_token_file)
        self._model_id = model_digest(Path(config.model))
        self._worker: Worker | None = None
        self._kv = KVClient(config.kvtransfer_address, config.worker_id, role, self._secret)
        self._epoch = time.time_ns()
        self._server = RpcServer(config.host, config.port, self._secret, config.worker_id)
        self._registrar = Registrar(config.redis, config.cluster, self._describe)
        self._undo = contextlib.AsyncExitStack()

    @property
    def worker(self) -> Worker:
        """The worker of a process that has started."""
        assert self._worker is not None
        return self._worker

    @classmethod
    async def start(cls, config: WorkerConfig, role: Role, add_service: AddService) -> WorkerProcess:
        """Register in Redis, load the model, join the arena and serve. Raises PacelineError.

        If this fails or is cancelled, everything is undone.
        """
        worker_id = config.worker_id or unique_name(role)
        process = cls(config.model_copy(update={"worker_id": worker_id}), role)
        async with process._undo:
            await process._start(add_service)
            process._undo = process._undo.pop_all()
        return process

    async def _start(self, add_service: AddService) -> None:
        config, undo = self._config, self._undo
        undo.push_async_callback(self._kv.session.close)
        undo.push_async_callback(self._leave)
        # The server only binds its port here and starts after the model is loaded, because gRPC takes no services after
        # the start. Calls wait until then.
        self.address = reachable_address(config, self._server.bind())
        await self._registrar.start()
        torch.set_num_threads(config.threads or available_cores())
        compute = await asyncio.to_thread(ComputeOptions.resolve, config)
        self.numerics = compute.numerics
        loaded = await asyncio.to_thread(_load, config, compute)
        arena = await self._kv.session.attach(loaded.layout, config.max_model_len or loaded.max_position)
        blocks = torch.frombuffer(arena.blocks, dtype=compute.dtype)
        memory = _kv_memory(config, compute, loaded, blocks, arena.path)
        undo.callback(memory.close)
        turns = _turns(config, compute.device, self._role, arena.turns, self._kv.session.id)
        if turns is not None:
            compute.kernels.take_turns(turns)
        max_model_len = _max_model_len(config, loaded, arena.slots, memory.slots)
        steps_in_flight = STEPS_IN_FLIGHT if config.async_scheduling else 1
        limits = WorkerLimits(max_model_len, config.max_batched_tokens, config.max_seqs, steps_in_flight)
        worker = Worker(loaded, self._model_id, memory, self._kv, limits, turns)
        add_ComputeServicer_to_server(ComputeService(worker), self._server.server)
        add_MaintenanceServicer_to_server(MaintenanceService(worker), self._server.server)
        connection = add_service(self._server.server, worker)
        await self._server.start()
        await warm_up(worker)
        worker.engine.start()
        undo.push_async_callback(self._stop_engine, worker)
        undo.push_async_callback(self._leave)  # no call may be left when the engine stops
        if connection is not None:
            listener = UnixListener(arena.path.parent, connection)
            await listener.start()
            undo.push_async_callback(listener.close)
            self.socket = str(listener.path)
        await self._server.set_ready(True)
        self._worker = worker
        self._registrar.announce()

    async def wait(self, stop: asyncio.Event) -> None:
        """Wait until `stop` is set. Raises UnavailableError if the worker cannot go on."""
        await self._first(stop.wait())
        if self._kv.session.lost.done() and not stop.is_set():
            # All blocks are lost with the session. A new process is the simplest way back to a clean state.
            raise UnavailableError("the kvtransfer service of this host went away")

    async def drain(self, seconds: float) -> None:
        """Take no new work. Finish running requests, or let gateways move them, for at most `seconds`.

        Requests that still run after that time are ended. Raises UnavailableError if the engine failed.
        """
        admission = self.worker.admission
        admission.begin_drain()
        self._registrar.announce()
        await self._server.set_ready(False)
        await self._first(admission.drain(seconds))
        if self._kv.session.lost.done() and admission.active:
            log.warning("the kvtransfer service of this host went away while %d requests ran", admission.active)

    async def _first(self, awaited: Coroutine[Any, Any, Any]) -> None:
        """Wait until `awaited` is done, the session is lost or the engine fails. The last raises UnavailableError."""
        task = asyncio.create_task(awaited)
        try:
            await asyncio.wait((task, self._kv.session.lost, self.worker.failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        if self.worker.failed.done():
            self.worker.failed.result()

    async def _leave(self) -> None:
        """Leave the cluster and end all calls."""
        await self._registrar.stop()
        await self._server.close(0)

    async def _stop_engine(self, worker: Worker) -> None:
        """Stop the engine. If its running step does not end, end the process.

        Closing the session would free blocks to which the step still writes, after a grace. If the process ends, the
        session ends when nobody can write any more.
        """
        if not await asyncio.to_thread(worker.engine.stop):
            log.critical("a step of the engine does not end; the process is ended at once")
            logging.shutdown()
            os._exit(1)

    async def close(self) -> None:
        """Leave the cluster, stop the engine, and end the session with kvtransfer."""
        await self._undo.aclose()

    def _describe(self) -> Member:
        member = Member(
            worker_id=self.worker_id,
            role=self._role,
            epoch=self._epoch,
            address=self.address,
            host_id=self._kv.session.host_id,
            state="starting",
            model=self._model_id,
            max_seqs=self._config.max_seqs,
            numerics=self.numerics,
        )
        if (worker := self._worker) is None:
            return member
        return replace(
            member,
            state="draining" if worker.admission.draining else "ready",
            layout=worker.layout.fingerprint,
            max_model_len=worker.limits.max_model_len,
            events=self.socket,
            load=worker.load(),
            metrics=metrics_to_pb(worker.samples()),
        )


def _load(config: WorkerConfig, compute: ComputeOptions) -> Loaded:
    speculative = parse_speculative_config(config.speculative_config)
    packed_dir = Path(config.packed_dir) if config.packed_dir else None
    folder, kernels = Path(config.model), compute.kernels
    how = config.quantization, config.model_impl, config.trust_remote_code
    return load(folder, compute.dtype, compute.device, kernels, speculative, packed_dir, *how)


def _turns(config: WorkerConfig, device: torch.device, role: Role, page: memoryview, session: int) -> Turns | None:
    """Return the worker's time slices; None if it does not use all cores of the machine, or computes on a GPU."""
    if device.type != "cpu" or torch.get_num_threads() < (os.cpu_count() or 1):
        return None
    itl_target = config.itl_target_ms / 1000 if config.itl_target_ms else None
    return PrefillTurns(page) if role == "prefill" else DecodeTurns(page, session, itl_target)


def _kv_memory(
    config: WorkerConfig, compute: ComputeOptions, loaded: Loaded, arena: torch.Tensor, path: Path
) -> KVMemory:
    if not compute.has_pool:
        return KVMemory(loaded.layout, arena)
    context_tokens = config.max_model_len or loaded.max_position
    return device_memory(loaded.layout, arena, path, compute.device, config.kv_pool_memory, context_tokens)


def _max_model_len(config: WorkerConfig, loaded: Loaded, arena_slots: int, pool_slots: int) -> int:
    """Return the tokens of the longest context that the model, the KV memory and the user allow. Raises ConfigError."""
    layout = loaded.layout
    option = "--kv-pool-memory" if pool_slots < arena_slots else "--kv-memory"
    wanted = config.max_model_len or loaded.max_position
    if wanted > loaded.max_position:
        raise ConfigError(f"--max-model-len {wanted} is more than the model's {loaded.max_position}")
    fitting = wanted
    while layout.slots_for(fitting) > pool_slots or layout.arena_slots_for(fitting) > arena_slots:
        fitting -= layout.alignment
    if fitting < layout.alignment or (config.max_model_len and fitting < wanted):
        raise ConfigError(
            f"the KV memory has room for one context of {max(fitting, 0)} tokens, not {wanted}; "
            f"raise {option} or lower --max-model-len"
        )
    if fitting < wanted:
        why = "contexts are limited to %d tokens, because the KV memory has no room for %d; raise %s"
        log.warning(why, fitting, wanted, option)
    return fitting
