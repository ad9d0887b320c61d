"""The decode service as a process."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from paceline.core.config import WorkerConfig
from paceline.proto import worker_pb2_grpc
from paceline.services.decode.event_socket import EventConnection
from paceline.services.decode.service import DecodeService
from paceline.services.worker.worker import Worker
from paceline.services.worker.worker_process import run_worker


async def run(config: WorkerConfig) -> None:
    """Serves until SIGTERM, then drains. Raises PacelineError."""
    await run_worker(config, "decode", add_decode)


def add_decode(server: grpc.aio.Server, worker: Worker) -> Callable[[], EventConnection]:
    """Serves `Decode`. Returns what makes connections for the events of gateways on this host."""
    service = DecodeService(worker)
    worker_pb2_grpc.add_DecodeServicer_to_server(service, server)
    return lambda: EventConnection(service.outboxes)
