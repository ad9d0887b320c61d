"""The service through which operators and the planner control a worker."""

from __future__ import annotations

import grpc.aio

from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc_errors import mapped_errors
from paceline.services.worker.worker import Worker

ResetContext = grpc.aio.ServicerContext[worker_pb2.ResetPoolRequest, worker_pb2.ResetPoolReply]
StepsContext = grpc.aio.ServicerContext[worker_pb2.StepsRequest, worker_pb2.StepsReply]
AdapterContext = grpc.aio.ServicerContext[worker_pb2.CheckAdapterRequest, common_pb2.Adapter]
RoleContext = grpc.aio.ServicerContext[worker_pb2.SetRoleRequest, worker_pb2.SetRoleReply]


class MaintenanceService(worker_pb2_grpc.MaintenanceServicer):
    """The gRPC service `Maintenance` of one worker."""

    def __init__(self, worker: Worker) -> None:
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
