"""What operators ask of any worker."""

from __future__ import annotations

import grpc.aio

from paceline.proto import worker_pb2, worker_pb2_grpc
from paceline.services.worker.worker import Worker

CallContext = grpc.aio.ServicerContext[worker_pb2.ResetPoolRequest, worker_pb2.ResetPoolReply]


class MaintenanceService(worker_pb2_grpc.MaintenanceServicer):
    """Serves `Maintenance` with one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def ResetPool(self, request: worker_pb2.ResetPoolRequest, context: CallContext) -> worker_pb2.ResetPoolReply:
        return worker_pb2.ResetPoolReply(blocks=await self._worker.reset_pool())
