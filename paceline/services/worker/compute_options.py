"""Device, dtype and kernels of a worker, after "auto" has been resolved for its machine and model."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.config import WorkerConfig, has_pools
from paceline.core.errors import ConfigError
from paceline.core.numerics import Numerics
from paceline.kernels import instruction_set_of, rounds_blocks, select_kernels
from paceline.kernels.interface import Kernels
from paceline.models.config import read_facts, weight_form
from paceline.models.identity import implementation_name

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """Resolved options of a worker's computation."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    has_pool: bool
    """Whether the worker computes in a pool of its own, above the arena."""
    numerics: Numerics

    @classmethod
    def resolve(cls, config: WorkerConfig) -> ComputeOptions:
        """Resolve the options from the model's config and this machine's devices. Raises ConfigError or ModelError."""
        device, has_pool = _device(config), has_pools(config)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"--device {config.device}: torch finds no GPU here; use cpu, or install torch with CUDA")
        if device.type == "cuda" and not has_pool:
            raise ConfigError(f"{device} cannot compute in the arena; leave out --kv-pool, or set it to device")
        dtype, kernels = _dtype(config), select_kernels(device, config.kernels)
        form = weight_form(Path(config.model), config.quantization)
        is_exact = form in ("gguf", "checkpoint") and rounds_blocks(kernels, dtype)
        code = implementation_name(Path(config.model), config.model_impl)
        type_name = str(dtype).removeprefix("torch.")
        numerics = Numerics(instruction_set_of(kernels, device), type_name, "none" if is_exact else form, code)
        return cls(device, dtype, kernels, has_pool, numerics)


def _device(config: WorkerConfig) -> torch.device:
    with contextlib.suppress(RuntimeError):  # torch knows no such device
        if (device := torch.device(config.device)).type in ("cpu", "cuda"):
            return device
    raise ConfigError(f"--device {config.device} is not supported; use cpu or cuda")


def _dtype(config: WorkerConfig) -> torch.dtype:
    name: str = config.dtype
    if name == "auto":
        name = read_facts(Path(config.model), config.model_impl).dtype
        if name == "float16":
            log.info("the model's weights are float16 and are computed in bfloat16; --dtype float32 loses no bits")
            name = "bfloat16"
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name} is not supported; choose one with --dtype {' or --dtype '.join(_DTYPES)}")
    return _DTYPES[name]
