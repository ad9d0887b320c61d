"""The process of a prefill worker."""

from __future__ import annotations

import grpc.aio

from paceline.core.config import WorkerConfig
from paceline.proto import worker_pb2_grpc
from paceline.services.prefill.service import PrefillService
from paceline.services.worker.make_worker import make_worker
from paceline.services.worker.shared_services import add_shared_services
from paceline.services.worker.worker import Worker
from paceline.services.worker.worker_process import run_worker


async def run(config: WorkerConfig) -> None:
    """Serve until SIGTERM, then drain. Raises PacelineError."""
    await run_worker(config, "prefill", make_worker, add_prefill)


def add_prefill(server: grpc.aio.Server, worker: Worker) -> None:
    """Add all services of a prefill worker to the server."""
    add_shared_services(server, worker)
    worker_pb2_grpc.add_PrefillServicer_to_server(PrefillService(worker), server)
