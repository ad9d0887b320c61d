"""The process of a worker that computes prompts, decodes, or waits for a role.

gRPC accepts no services after a server has started, so a worker has the services of all roles. Its role decides which
services accept work.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from paceline.core.config import WorkerConfig
from paceline.proto import worker_pb2_grpc
from paceline.services.common.registry import Role
from paceline.services.decode.outbox import EventConnection
from paceline.services.decode.service import DecodeService
from paceline.services.prefill.service import PrefillService
from paceline.services.worker.compute import ComputeService, handlers_of
from paceline.services.worker.maintenance import MaintenanceService
from paceline.services.worker.make_worker import make_worker
from paceline.services.worker.request_media import WorkerMedia
from paceline.services.worker.worker import Worker
from paceline.services.worker.worker_process import run_worker


def add_shared_services(server: grpc.aio.Server, worker: Worker) -> None:
    """Add `Compute`, `Maintenance` and `Media` to the server."""
    worker_pb2_grpc.add_ComputeServicer_to_server(ComputeService(worker, handlers_of(worker)), server)
    worker_pb2_grpc.add_MaintenanceServicer_to_server(MaintenanceService(worker), server)
    worker_pb2_grpc.add_MediaServicer_to_server(WorkerMedia(worker.media), server)


async def run(config: WorkerConfig, role: Role) -> None:
    """Serve requests until SIGTERM, then drain. Raises PacelineError if the worker cannot start or go on."""
    await run_worker(config, role, make_worker, add_services)


def add_services(server: grpc.aio.Server, worker: Worker) -> Callable[[], EventConnection]:
    """Add the services of all roles. Return a factory for connections that send events to gateways on this host."""
    add_shared_services(server, worker)
    decode = DecodeService(worker)
    worker_pb2_grpc.add_PrefillServicer_to_server(PrefillService(worker), server)
    worker_pb2_grpc.add_DecodeServicer_to_server(decode, server)
    return lambda: EventConnection(decode.outboxes)
