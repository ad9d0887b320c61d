"""The prefill service as a process."""

from __future__ import annotations

import grpc.aio

from paceline.core.config import WorkerConfig
from paceline.proto import worker_pb2_grpc
from paceline.services.prefill.service import PrefillService
from paceline.services.worker.worker import Worker
from paceline.services.worker.worker_process import run_worker


async def run(config: WorkerConfig) -> None:
    """Serves until SIGTERM, then drains. Raises PacelineError."""
    await run_worker(config, "prefill", add_prefill)


def add_prefill(server: grpc.aio.Server, worker: Worker) -> None:
    """Serves `Prefill`."""
    worker_pb2_grpc.add_PrefillServicer_to_server(PrefillService(worker), server)
