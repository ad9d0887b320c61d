"""What operators and the planner ask of a worker."""

from __future__ import annotations

import grpc.aio

from paceline.proto import worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc import mapped_errors
from paceline.services.worker.worker import Worker

ResetContext = grpc.aio.ServicerContext[worker_pb2.ResetPoolRequest, worker_pb2.ResetPoolReply]
RoleContext = grpc.aio.ServicerContext[worker_pb2.SetRoleRequest, worker_pb2.SetRoleReply]


class MaintenanceService(worker_pb2_grpc.MaintenanceServicer):
    """Serves `Maintenance` with one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def ResetPool(self, request: worker_pb2.ResetPoolRequest, context: ResetContext) -> worker_pb2.ResetPoolReply:
        return worker_pb2.ResetPoolReply(blocks=await self._worker.reset_pool())

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: RoleContext) -> worker_pb2.SetRoleReply:
        async with mapped_errors(context):
            return worker_pb2.SetRoleReply(epoch=self._worker.role.change(self._worker, request.role, request.epoch))
        raise AssertionError("mapped_errors ended the call")
