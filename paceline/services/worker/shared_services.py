"""The services that prefill and decode workers share."""

from __future__ import annotations

import grpc.aio

from paceline.proto import worker_pb2_grpc
from paceline.services.worker.compute import ComputeService, handlers_of
from paceline.services.worker.maintenance import MaintenanceService
from paceline.services.worker.request_media import WorkerMedia
from paceline.services.worker.worker import Worker


def add_shared_services(server: grpc.aio.Server, worker: Worker) -> None:
    """Add `Compute`, `Maintenance` and `Media` to the server."""
    worker_pb2_grpc.add_ComputeServicer_to_server(ComputeService(worker, handlers_of(worker)), server)
    worker_pb2_grpc.add_MaintenanceServicer_to_server(MaintenanceService(worker), server)
    worker_pb2_grpc.add_MediaServicer_to_server(WorkerMedia(worker.media), server)
