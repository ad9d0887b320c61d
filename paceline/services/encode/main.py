"""The process of an encode worker."""

from __future__ import annotations

import grpc.aio

from paceline.core.config import WorkerConfig
from paceline.proto import common_pb2, worker_pb2_grpc
from paceline.services.encode.worker import EncodeWorker, make_worker
from paceline.services.worker.compute import ComputeService
from paceline.services.worker.maintenance import SleepService
from paceline.services.worker.worker_process import run_worker


async def run(config: WorkerConfig) -> None:
    """Serve encodings until SIGTERM, then drain. Raises PacelineError if the worker cannot start or go on."""
    await run_worker(config, "encode", make_worker, add_encode)


def add_encode(server: grpc.aio.Server, worker: EncodeWorker) -> None:
    """Add `Compute` to the server, for encodings only, and `Maintenance`."""
    handlers = {common_pb2.WORK_KIND_ENCODE: worker.encoding.serve}
    worker_pb2_grpc.add_ComputeServicer_to_server(ComputeService(worker, handlers), server)
    worker_pb2_grpc.add_MaintenanceServicer_to_server(SleepService(worker.sleep), server)
