"""The service through which operators and the planner control a worker."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.proto.fleet_pb2 import Sleep
from paceline.services.common.rpc_errors import mapped_errors
from paceline.services.worker.worker import Worker
from paceline.services.worker.worker_sleep import WorkerSleep

ResetContext = grpc.aio.ServicerContext[worker_pb2.ResetPoolRequest, worker_pb2.ResetPoolReply]
StepsContext = grpc.aio.ServicerContext[worker_pb2.StepsRequest, worker_pb2.StepsReply]
AdapterContext = grpc.aio.ServicerContext[worker_pb2.CheckAdapterRequest, common_pb2.Adapter]
RoleContext = grpc.aio.ServicerContext[worker_pb2.SetRoleRequest, worker_pb2.SetRoleReply]
CheckContext = grpc.aio.ServicerContext[Sleep, worker_pb2.CheckSleepReply]
SleepContext = grpc.aio.ServicerContext[Sleep, worker_pb2.SetSleepReply]


class SleepService(worker_pb2_grpc.MaintenanceServicer):
    """The gRPC service `Maintenance` of a worker with one role and no blocks of its own: it can only sleep."""

    def __init__(self, sleep: WorkerSleep) -> None:
        self._sleep = sleep

    async def CheckSleep(self, request: Sleep, context: CheckContext) -> worker_pb2.CheckSleepReply:
        async with mapped_errors(context):
            self._sleep.check(request)
        return worker_pb2.CheckSleepReply()

    async def SetSleep(self, request: Sleep, context: SleepContext) -> worker_pb2.SetSleepReply:
        async with mapped_errors(context):
            await self._sleep.set(request)
        return worker_pb2.SetSleepReply()

    async def ResetPool(self, request: worker_pb2.ResetPoolRequest, context: ResetContext) -> worker_pb2.ResetPoolReply:
        raise await _unknown(context)

    async def Steps(self, request: worker_pb2.StepsRequest, context: StepsContext) -> worker_pb2.StepsReply:
        raise await _unknown(context)

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: RoleContext) -> worker_pb2.SetRoleReply:
        raise await _unknown(context)

    async def CheckAdapter(
        self, request: worker_pb2.CheckAdapterRequest, context: AdapterContext
    ) -> common_pb2.Adapter:
        raise await _unknown(context)


async def _unknown(context: grpc.aio.ServicerContext[Any, Any]) -> NotImplementedError:
    """End a call that only prefill and decode workers know."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "only prefill and decode workers know this call")
    return NotImplementedError()


class MaintenanceService(SleepService):
    """The gRPC service `Maintenance` of one worker."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.sleep)
        self._worker = worker

    async def ResetPool(self, request: worker_pb2.ResetPoolRequest, context: ResetContext) -> worker_pb2.ResetPoolReply:
        return worker_pb2.ResetPoolReply(blocks=await self._worker.reset_pool())

    async def Steps(self, request: worker_pb2.StepsRequest, context: StepsContext) -> worker_pb2.StepsReply:
        worker = self._worker
        steps = worker.engine.stats.log.newest(request.most)
        return worker_pb2.StepsReply(
            steps=[worker_pb2.StepRecord(**step._asdict()) for step in steps],
            max_batched_tokens=worker.limits.max_batched_tokens,
            takes_turns=worker.takes_turns,
            itl_target_seconds=worker.limits.itl_target or 0.0,
        )

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: RoleContext) -> worker_pb2.SetRoleReply:
        async with mapped_errors(context):
            return worker_pb2.SetRoleReply(epoch=self._worker.role.change(self._worker, request.role, request.epoch))
        raise AssertionError("mapped_errors ended the call")

    async def CheckAdapter(
        self, request: worker_pb2.CheckAdapterRequest, context: AdapterContext
    ) -> common_pb2.Adapter:
        async with mapped_errors(context):
            return await self._worker.adapters.examine(request.name, request.folder)
        raise AssertionError("mapped_errors ended the call")
