"""The process of a pool worker."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import grpc.aio

from paceline.core.config import PoolConfig, WorkerConfig, quantization_of
from paceline.core.numerics import Numerics
from paceline.kernels import instruction_set_of, rounds_blocks, select_kernels
from paceline.models.config import weight_form
from paceline.models.identity import model_identity
from paceline.models.pooling.loader import load_pooling_model, stored_dtype
from paceline.models.pooling.model import PoolingModel
from paceline.proto import common_pb2, worker_pb2_grpc
from paceline.services.pool.worker import PoolWorker
from paceline.services.worker.compute import ComputeService
from paceline.services.worker.maintenance import SleepService
from paceline.services.worker.worker_process import run_worker
from paceline.services.worker.worker_setup import ComputeOptions, WorkerSetup, chosen_device, named_dtype


async def run(config: PoolConfig) -> None:
    """Serve until SIGTERM, then drain. Raises PacelineError if the worker cannot start or go on."""
    await run_worker(config, "pool", make_worker, add_pool, resolve)


def add_pool(server: grpc.aio.Server, worker: PoolWorker) -> None:
    """Add `Compute` to the server, for pooling only, and `Maintenance`."""
    handlers = {common_pb2.WORK_KIND_POOL: worker.serve}
    worker_pb2_grpc.add_ComputeServicer_to_server(ComputeService(worker, handlers), server)
    worker_pb2_grpc.add_MaintenanceServicer_to_server(SleepService(worker.sleep), server)


def resolve(config: WorkerConfig) -> ComputeOptions:
    """Resolve the options of the computation. Raises ConfigError or ModelError."""
    folder, device = Path(config.model), chosen_device(config)
    dtype = stored_dtype(folder) if config.dtype == "auto" else named_dtype(config.dtype)
    kernels = select_kernels(device, config.kernels)
    form = weight_form(folder, quantization_of(config))
    is_exact = form in ("gguf", "checkpoint") and rounds_blocks(kernels, dtype)
    type_name = str(dtype).removeprefix("torch.")
    numerics = Numerics(instruction_set_of(kernels, device), type_name, "none" if is_exact else str(form))
    return ComputeOptions(device, dtype, kernels, has_pool=False, numerics=numerics)


async def make_worker(setup: WorkerSetup) -> PoolWorker:
    """Load the model and return the worker. Raises PacelineError."""
    model, weights = await asyncio.to_thread(_load, setup)
    return PoolWorker(model, weights, setup, partial(_load, setup))


def _load(setup: WorkerSetup) -> tuple[PoolingModel, str]:
    compute, form = setup.compute, quantization_of(setup.config)
    model = load_pooling_model(setup.folder, compute.dtype, compute.kernels, compute.device, form)
    type_name = str(compute.dtype).removeprefix("torch.")
    return model, model_identity(setup.folder, type_name, form).weights
