"""The process of a worker: load the model, join the arena, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio
import torch

from paceline.core.config import WorkerConfig
from paceline.core.errors import ModelError, UnavailableError
from paceline.core.kv_layout import KVLayout
from paceline.core.machine import available_cores, process_seconds
from paceline.core.metrics import Sample
from paceline.core.model_folder import read_model_files
from paceline.core.numerics import Numerics
from paceline.engine.engine import Engine
from paceline.models.files.folder_lease import lease_model
from paceline.proto.fleet_pb2 import AdapterReport, LoadReport, WorkReport
from paceline.services.common.credentials import read_credentials
from paceline.services.common.lifecycle import (
    announce_ready,
    reachable_address,
    start_unless_stopped,
    stop_on_signals,
    unique_name,
)
from paceline.services.common.member_signatures import MemberSignatures
from paceline.services.common.process_samples import ProcessSamples
from paceline.services.common.registry import Member, Registrar, Role, metrics_to_pb
from paceline.services.common.rpc import RpcServer
from paceline.services.common.tasks import end_tasks
from paceline.services.common.unix_socket import Framed, UnixListener
from paceline.services.worker.admission import WorkerAdmission
from paceline.services.worker.kv_client import KVClient
from paceline.services.worker.worker_role import WorkerRole
from paceline.services.worker.worker_setup import ComputeOptions, WorkerSetup
from paceline.services.worker.worker_sleep import WorkerSleep

log = logging.getLogger(__name__)

_LAST_FIGURES_SECONDS = 0.2
"""Time from the end of a worker's last request to the report with its figures, in seconds. The engine's last step ends
meanwhile, and short requests that follow each other cost few reports."""


class AnyWorker(Protocol):
    """A worker of any role, as its process uses it."""

    engine: Engine
    admission: WorkerAdmission
    weights: str
    """Digest of the model's config and weights; workers with equal digests can continue each other's answers."""
    sleep: WorkerSleep
    failed: asyncio.Future[None]
    """A future that gets an exception if the engine fails."""

    @property
    def layout(self) -> KVLayout | None:
        """Layout of the blocks with which the worker computes; None if it has none."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest context."""

    def load(self) -> LoadReport:
        """Return the worker's load, by which gateways place requests."""

    def lora(self) -> AdapterReport:
        """Return the report about adapters in memory, by which gateways place requests."""

    def work(self) -> WorkReport:
        """Return the report for the planner, without the times of the process."""

    def samples(self) -> Iterable[Sample]:
        """Return the present values of the worker's metrics."""


W = TypeVar("W", bound=AnyWorker)

MakeWorker = Callable[[WorkerSetup], Awaitable[W]]
"""A function that loads the model, joins the host's arena, and returns the worker."""

AddServices = Callable[[grpc.aio.Server, W], Callable[[], Framed] | None]
"""A function that adds services to the server. It returns a factory for connections of the worker's Unix socket on this
host; None if the worker has no such socket."""


Resolve = Callable[[WorkerConfig], ComputeOptions]
"""A function that resolves the options of a worker's computation."""


async def run_worker(
    config: WorkerConfig, role: Role, make: MakeWorker[W], add_services: AddServices[W], resolve: Resolve | None = None
) -> None:
    """Serve until SIGTERM, then drain. Raises PacelineError if the worker cannot start or go on.

    Args:
        resolve: for a worker without KV blocks: resolves the options of its computation. Such a worker has no session
            with a kvtransfer.
    """
    stop = stop_on_signals()
    process = await start_unless_stopped(WorkerProcess.start(config, role, make, add_services, resolve), stop)
    announce_ready(config, process.address)
    log.info("%s %s serves at %s, computes with %s", role, process.worker_id, process.address, process.numerics)
    try:
        await process.wait(stop)
        await process.drain(config.drain_seconds)
    finally:
        await process.close()


class WorkerProcess(Generic[W]):
    """A worker with its server, its membership in the cluster and, if it has KV blocks, its session with kvtransfer."""

    def __init__(self, config: WorkerConfig, role: Role, resolve: Resolve | None = None) -> None:
        self.worker_id = config.worker_id
        self.address = ""
        self.socket = ""
        """Path of the Unix socket for gateways on this host; "" if the worker has none."""
        self.numerics: Numerics | None = None
        """The worker's numerics; None until the options are resolved."""
        # A link to the folder may lead to another model when a file is read later.
        folder = Path(config.model).resolve()
        self._config = config.model_copy(update={"model": str(folder)})
        self._role = WorkerRole(role, config.drain_seconds, self._tell_role_change)
        credentials = read_credentials(config)
        self._files = read_model_files(folder)
        self._lease = lease_model(folder)
        self._worker: W | None = None
        self._resolve = resolve or ComputeOptions.resolve
        has_blocks = resolve is None
        self._kv = KVClient(config.kvtransfer_address, config.worker_id, role, credentials) if has_blocks else None
        self._startup_seconds = 0.0
        self._state_since = time.monotonic()
        self._process_samples = ProcessSamples()
        self._server = RpcServer(config.host, config.port, credentials, config.worker_id)
        signatures = MemberSignatures(credentials.secret, config.cluster)
        self._registrar = Registrar(config.redis, config.cluster, self._describe, signatures)
        self._undo = contextlib.AsyncExitStack()

    @property
    def worker(self) -> W:
        """The worker; only for a process that has started."""
        assert self._worker is not None
        return self._worker

    @classmethod
    async def start(
        cls,
        config: WorkerConfig,
        role: Role,
        make: MakeWorker[W],
        add_services: AddServices[W],
        resolve: Resolve | None = None,
    ) -> WorkerProcess[W]:
        """Register in Redis, load the model, join the arena and serve. Raises PacelineError.

        If this fails or is cancelled, everything is undone.
        """
        worker_id = config.worker_id or unique_name(role)
        process = cls(config.model_copy(update={"worker_id": worker_id}), role, resolve)
        async with process._undo:
            await process._start(make, add_services)
            process._undo = process._undo.pop_all()
        return process

    async def _start(self, make: MakeWorker[W], add_services: AddServices[W]) -> None:
        config, undo = self._config, self._undo
        if self._kv is not None:
            undo.push_async_callback(self._kv.session.close)
        undo.push_async_callback(self._leave)
        # The server only binds its port here and starts after the model is loaded, because gRPC takes no services after
        # the start. Calls wait until then.
        self.address = self._server.known_as(reachable_address(config, self._server.bind()))
        await self._registrar.start()
        torch.set_num_threads(config.threads or available_cores())
        compute = await asyncio.to_thread(self._resolve, config)
        self.numerics = compute.numerics
        worker = await make(WorkerSetup(config, compute, self._role, self._files.digest, self._kv, undo))
        if await asyncio.to_thread(read_model_files, Path(config.model)) != self._files:
            raise ModelError(f"{config.model} changed while it was read; start again when it is complete")
        connection = add_services(self._server.server, worker)
        await self._server.start()
        worker.engine.start()
        undo.push_async_callback(self._stop_engine, worker)
        undo.push_async_callback(self._leave)  # no call may be left when the engine stops
        if connection is not None and self._kv is not None:
            listener = UnixListener(self._kv.session.arena_path.parent, connection)
            await listener.start()
            undo.push_async_callback(listener.close)
            self.socket = str(listener.path)
        undo.push_async_callback(worker.sleep.stop)
        undo.push_async_callback(self._role.stop)  # a change of role must not go on in a worker that failed
        await self._server.set_ready(True)
        self._worker = worker
        self._startup_seconds, self._state_since = process_seconds(), time.monotonic()
        self._registrar.announce()
        undo.push_async_callback(end_tasks, asyncio.create_task(self._tell_last_figures(worker.admission)))

    async def _tell_last_figures(self, admission: WorkerAdmission) -> None:
        """Write the member soon after each time that the last request has ended, so that metrics are soon complete."""
        while True:
            await admission.emptied()
            await asyncio.sleep(_LAST_FIGURES_SECONDS)
            self._registrar.announce()

    async def wait(self, stop: asyncio.Event) -> None:
        """Wait until `stop` is set or kvtransfer leaves. Raises UnavailableError if the worker cannot go on."""
        kv = self._kv
        await self._first(_first_set(stop, *([] if kv is None else [kv.session.leaving])))
        if kv is not None and kv.session.lost.done() and not stop.is_set():
            # All blocks are lost with the session. A new process is the simplest way back to a clean state.
            raise UnavailableError("the kvtransfer service of this host went away")

    async def drain(self, seconds: float) -> None:
        """Take no new work. Finish running requests, or let gateways move them, for at most `seconds`.

        The last worker of a host also waits until other hosts have copied the hot prefixes of its host. Requests that
        still run after `seconds` are ended. Raises UnavailableError if the engine failed.
        """
        admission = self.worker.admission
        await self.worker.sleep.stop()
        admission.begin_drain()
        await self._role.stop()
        self._state_since = time.monotonic()
        self._registrar.announce()
        await self._server.set_ready(False)
        await self._first(self._empty(seconds))
        if self._kv is not None and self._kv.session.lost.done() and admission.active:
            log.warning("the kvtransfer service of this host went away while %d requests ran", admission.active)

    async def _empty(self, seconds: float) -> None:
        """Wait up to `seconds` until nothing runs and other hosts have copied this host's hot prefixes."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.worker.admission.drain(seconds))
            if self._kv is not None:
                group.create_task(self._kv.leave(seconds))

    async def _first(self, awaited: Coroutine[Any, Any, Any]) -> None:
        """Wait until `awaited` is done, the session is lost or the engine fails. The last raises UnavailableError."""
        task = asyncio.create_task(awaited)
        lost = [] if self._kv is None else [self._kv.session.lost]
        try:
            await asyncio.wait((task, *lost, self.worker.failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        if self.worker.failed.done():
            self.worker.failed.result()

    async def _tell_role_change(self, ready: bool) -> None:
        """Tell the cluster that the worker drains to change its role, or serves in its new role."""
        self._state_since = time.monotonic()
        self._registrar.announce()
        await self._server.set_ready(ready)

    async def _leave(self) -> None:
        """Remove the member from the cluster, and stop the server, which ends all calls."""
        await self._registrar.stop()
        await self._server.close(0)

    async def _stop_engine(self, worker: W) -> None:
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
            role=self._role.name,
            epoch=self._role.epoch,
            address=self.address,
            host_id="" if self._kv is None else self._kv.session.host_id,
            state="starting",
            model=self._files.digest,
            files=self._files.digests,
            max_seqs=self._config.max_seqs,
            numerics=self.numerics,
        )
        # Gateways parse only reports that have changed, so this one changes seldom.
        state_seconds = 2.0 ** math.floor(math.log2(max(time.monotonic() - self._state_since, 1.0)))
        if (worker := self._worker) is None:
            return replace(member, work=WorkReport(state_seconds=state_seconds))
        work = worker.work()
        work.startup_seconds, work.state_seconds = self._startup_seconds, state_seconds
        return replace(
            member,
            state=worker.admission.state,
            sleep=worker.sleep.state,
            layout="" if worker.layout is None else worker.layout.fingerprint,
            weights=worker.weights,
            max_model_len=worker.max_model_len,
            events=self.socket if self._role.name == "decode" else "",
            load=worker.load(),
            lora=worker.lora(),
            work=work,
            metrics=metrics_to_pb([*worker.samples(), *self._process_samples]),
        )


async def _first_set(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
