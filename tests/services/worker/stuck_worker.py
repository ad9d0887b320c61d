"""A decode worker whose first step never ends: stuck_worker.py MODEL KVTRANSFER REDIS. It prints its address."""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial

import grpc.aio

from paceline.core.config import WorkerConfig
from paceline.engine.step import Step, StepResult
from paceline.proto import worker_pb2_grpc
from paceline.services.decode.service import DecodeService
from paceline.services.worker.make_worker import make_worker
from paceline.services.worker.worker import Worker
from paceline.services.worker.worker_process import run_worker


class StuckRunner:
    def execute(self, step: Step) -> StepResult:
        print("the step begins", file=sys.stderr, flush=True)
        time.sleep(3600)
        raise AssertionError("the stuck step has ended")


def add_service(server: grpc.aio.Server, worker: Worker) -> None:
    worker.engine.computing.runner = StuckRunner()
    worker.engine.stop = partial(worker.engine.stop, timeout=0.2)  # type: ignore[method-assign]
    worker_pb2_grpc.add_DecodeServicer_to_server(DecodeService(worker), server)


if __name__ == "__main__":
    model, kvtransfer, redis = sys.argv[1:]
    config = WorkerConfig(
        model=model, kvtransfer_address=kvtransfer, redis=redis, cluster="stuck", threads=1, drain_seconds=0, ready_fd=1
    )
    asyncio.run(run_worker(config, "decode", make_worker, add_service))
