"""Toy workers that use the real protocol over real gRPC and Redis, and recite a text instead of computing one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import cast

import grpc
import grpc.aio

from paceline.core.adapters import read_adapter
from paceline.core.block_counts import Counts
from paceline.core.errors import BusyError, ConfigError, InvalidRequestError, ModelError, PacelineError
from paceline.core.metrics import Sample
from paceline.core.numerics import Numerics
from paceline.engine.compute_thread import STEP_SECONDS
from paceline.engine.stats import SchedulerStats
from paceline.proto import common_pb2, kvtransfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.proto.fleet_pb2 import AdapterReport, HostReport, LoadReport, Sleep
from paceline.services.common.credentials import Credentials
from paceline.services.common.member_signatures import MemberSignatures
from paceline.services.common.registry import Member, Registrar, Role, State, metrics_to_pb
from paceline.services.common.rpc import RpcServer
from paceline.services.common.rpc_errors import mapped_errors
from paceline.services.common.wire import adapter_to_pb
from paceline.services.common.wire_version import OURS, WireVersions
from paceline.services.worker.worker import OFFLOAD_BYTES, WEIGHT_BYTES
from tests.services.gateway.toy_calls import ToyCalls
from tests.services.gateway.toy_kvtransfer import ToyKVTransfer
from tests.services.gateway.toy_services import ToyCompute, ToyDecode, ToyMedia, ToyPrefill

TEXT = "The quick brown fox jumps over the lazy dog, ünïcödé ✓ and back again. "

PORT_SECONDS = 10.0
"""Longest wait for a port, in seconds."""
_NOTHING = Credentials()


def _worker_samples() -> list[Sample]:
    stats = SchedulerStats(preemptions=2, drafts=4, draft_tokens=9, accepted_tokens=5, accepted_by_position=[3, 2])
    stats.decode_model_seconds = 0.25
    for seconds in (0.005, 0.009, 0.016):
        stats.swap_ins.observe(seconds)
    return [
        *stats.samples(),
        Sample("bubble_seconds", 0.5, STEP_SECONDS, {"kind": "bubble"}),
        Sample("loaded_bytes", 4096, OFFLOAD_BYTES, {"direction": "load"}),
        Sample("weight_bytes_int4", 3000, WEIGHT_BYTES, {"format": "int4"}),
        Sample("weight_bytes_bfloat16", 1000, WEIGHT_BYTES, {"format": "bfloat16"}),
        *Counts(total=4, free=3, held=1, in_flight=0, cached=0).samples(),
    ]


def _host_samples() -> list[Sample]:
    return list(Counts(total=10, free=5, held=2, in_flight=3, cached=0).samples())


_epochs = itertools.count(1)


class ToyWorker(ToyCalls, ToyKVTransfer):
    """A toy worker of any role."""

    def __init__(
        self,
        role: Role,
        worker_id: str,
        *,
        text: str = TEXT,
        host_id: str = "host",
        port: int = 0,
        max_seqs: int = 8,
        max_model_len: int = 512,
        credentials: Credentials = _NOTHING,
        state: State = "ready",
        model: str = "",
        numerics: Numerics | None = None,
        weights: str = "",
        files: Mapping[str, str] | None = None,
        wire: WireVersions = OURS,
    ) -> None:
        super().__init__(host_id, text, max_seqs)
        self.role: Role = role
        self.worker_id = worker_id
        self.state: State = state
        self.model = model
        self.numerics = numerics
        self.weights = weights
        self.files = files or {}
        self.wire = wire
        self.layout = "fingerprint"
        self.max_model_len = max_model_len
        self.resets = 0
        self.sleep = Sleep()
        self.wishes: list[Sleep] = []
        """Wishes for its sleep that the worker was told."""
        self.sleep_refusal: PacelineError | None = None
        self.late_refusal: PacelineError | None = None
        """The error of a worker that says it can sleep, and cannot."""
        self.expectations = []
        self.pretends_to_cache = []  # a request finds 16 cached tokens, whatever this list says
        self.samples = _worker_samples() if role != "kvtransfer" else _host_samples()
        self.host_report = HostReport()
        self.lora = AdapterReport()
        self._rpc = RpcServer("127.0.0.1", port, credentials, worker_id)
        self._registrar: Registrar | None = None
        self._secret = credentials.secret
        self._epoch = next(_epochs)
        self.port = port

    async def start(self, redis_url: str, cluster: str) -> ToyWorker:
        worker_pb2_grpc.add_PrefillServicer_to_server(ToyPrefill(self), self._rpc.server)
        worker_pb2_grpc.add_DecodeServicer_to_server(ToyDecode(self), self._rpc.server)
        worker_pb2_grpc.add_ComputeServicer_to_server(ToyCompute(self), self._rpc.server)
        worker_pb2_grpc.add_MaintenanceServicer_to_server(_ToyMaintenance(self), self._rpc.server)
        worker_pb2_grpc.add_MediaServicer_to_server(ToyMedia(self), self._rpc.server)
        kvtransfer_pb2_grpc.add_KVTransferServicer_to_server(self, self._rpc.server)
        async with asyncio.timeout(PORT_SECONDS):
            while not self._is_bound():
                await asyncio.sleep(0.1)
        self.port = await self._rpc.start()
        await self._rpc.set_ready(True)
        self._registrar = Registrar(redis_url, cluster, self._member, MemberSignatures(self._secret, cluster))
        await self._registrar.start()
        return self

    def _is_bound(self) -> bool:
        """Take the port. A connection of another test may have the port of a worker that has ended, for a moment."""
        try:
            self._rpc.bind()
        except ConfigError:
            return False
        return True

    async def stop(self) -> None:
        """Leave Redis and stop the server."""
        await self.leave_redis()
        await self._rpc.close(0)

    async def set_sleep(self, wish: Sleep) -> None:
        """Sleep when no request runs, or wake."""
        self.wishes.append(wish)
        if (refusal := self.sleep_refusal or self.late_refusal) is not None:
            raise refusal
        is_sleep = bool(wish.weights or wish.kv_cache)
        if is_sleep:
            self.refusal = BusyError("this worker sleeps")
            while self.active and wish.changed == self.wishes[-1].changed:
                await asyncio.sleep(0.01)
        if wish.changed == self.wishes[-1].changed:
            self.sleep, self.state = wish, "sleeping" if is_sleep else "ready"
            self.refusal = self.refusal if is_sleep else None
        if self._registrar is not None:
            self._registrar.announce()

    async def leave_redis(self) -> None:
        """Remove the worker from Redis, but keep serving."""
        if self._registrar is not None:
            registrar, self._registrar = self._registrar, None
            await registrar.stop()

    async def serve_health(self, serving: bool) -> None:
        await self._rpc.set_ready(serving)

    async def fall_silent(self) -> None:
        """Stop the heartbeat. Redis lists the worker until its entry expires."""
        if self._registrar is not None and self._registrar._task is not None:
            self._registrar._task.cancel()

    async def crash(self) -> None:
        """Stop the server and the heartbeat at once."""
        await self.fall_silent()
        await self._rpc.server.stop(None)

    def take_role(self, role: Role) -> int:
        """Change the role at once, as a worker without requests does. Return the new epoch."""
        self.role, self._epoch = role, next(_epochs)
        if self._registrar is not None:
            self._registrar.announce()
        return self._epoch

    def _member(self) -> Member:
        return Member(
            worker_id=self.worker_id,
            role=self.role,
            epoch=self._epoch,
            address=f"127.0.0.1:{self.port}",
            host_id=self.host_id,
            wire=self.wire,
            state=self.state,
            model=self.model,
            layout=self.layout,
            max_model_len=self.max_model_len,
            max_seqs=self.max_seqs,
            numerics=self.numerics,
            weights=self.weights,
            files=self.files,
            load=LoadReport(running=self.active),
            host=self._host_report(),
            lora=self.lora,
            sleep=self.sleep,
            metrics=metrics_to_pb(self.samples),
        )

    def _host_report(self) -> HostReport:
        report = HostReport(next_block_event=int(bool(self.pretends_to_cache)))
        report.MergeFrom(self.host_report)
        return report


class _ToyMaintenance(worker_pb2_grpc.MaintenanceServicer):
    def __init__(self, worker: ToyWorker) -> None:
        self._worker = worker

    async def CheckSleep(  # type: ignore[override]
        self, request: Sleep, context: grpc.aio.ServicerContext
    ) -> worker_pb2.CheckSleepReply:
        async with mapped_errors(context):
            if isinstance(self._worker.sleep_refusal, InvalidRequestError):
                raise self._worker.sleep_refusal
        return worker_pb2.CheckSleepReply()

    async def SetSleep(  # type: ignore[override]
        self, request: Sleep, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SetSleepReply:
        async with mapped_errors(context):
            await self._worker.set_sleep(request)
        return worker_pb2.SetSleepReply()

    async def ResetPool(  # type: ignore[override]
        self, request: worker_pb2.ResetPoolRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ResetPoolReply:
        self._worker.resets += 1
        return worker_pb2.ResetPoolReply(blocks=3)

    async def Steps(  # type: ignore[override]
        self, request: worker_pb2.StepsRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.StepsReply:
        return worker_pb2.StepsReply(steps=[worker_pb2.StepRecord(number=7, seconds=0.25, prompt_tokens=128)])

    async def SetRole(  # type: ignore[override]
        self, request: worker_pb2.SetRoleRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SetRoleReply:
        return worker_pb2.SetRoleReply(epoch=self._worker.take_role(cast(Role, request.role)))

    async def CheckAdapter(  # type: ignore[override]
        self, request: worker_pb2.CheckAdapterRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.Adapter:
        async with mapped_errors(context):
            try:
                if not request.folder.startswith("/"):  # a name on the hub
                    return common_pb2.Adapter(name=request.name, folder=f"{request.folder}@commit", digest=bytes(32))
                return adapter_to_pb(read_adapter(request.name, request.folder))
            except ModelError as error:
                raise InvalidRequestError(str(error)) from None
        raise AssertionError("mapped_errors ended the call")
