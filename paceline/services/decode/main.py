"""The decode service as a process."""

from __future__ import annotations

from paceline.core.config import WorkerConfig
from paceline.proto import worker_pb2_grpc
from paceline.services.common.worker_process import run_worker
from paceline.services.decode.service import DecodeService


async def run(config: WorkerConfig) -> None:
    """Serves until SIGTERM, then drains. Raises PacelineError."""
    await run_worker(
        config,
        "decode",
        lambda server, worker: worker_pb2_grpc.add_DecodeServicer_to_server(DecodeService(worker), server),
    )
