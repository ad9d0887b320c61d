"""The process of a decode worker."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from paceline.core.config import WorkerConfig
from paceline.proto import worker_pb2_grpc
from paceline.services.decode.event_socket import EventConnection
from paceline.services.decode.service import DecodeService
from paceline.services.worker.make_worker import make_worker
from paceline.services.worker.shared_services import add_shared_services
from paceline.services.worker.worker import Worker
from paceline.services.worker.worker_process import run_worker


async def run(config: WorkerConfig) -> None:
    """Serve until SIGTERM, then drain. Raises PacelineError."""
    await run_worker(config, "decode", make_worker, add_decode)


def add_decode(server: grpc.aio.Server, worker: Worker) -> Callable[[], EventConnection]:
    """Add the services of a decode worker. Return a factory for connections that send events to gateways here."""
    add_shared_services(server, worker)
    service = DecodeService(worker)
    worker_pb2_grpc.add_DecodeServicer_to_server(service, server)
    return lambda: EventConnection(service.outboxes)
