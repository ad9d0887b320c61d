"""Backends of all hot operations, one for each kind of device. `select_kernels` is the only place that chooses one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

import torch

from paceline.core.env import instruction_set
from paceline.core.errors import ConfigError
from paceline.kernels.interface import Kernels
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.kernels import INTEGER_PRODUCTS
from paceline.kernels.reference import ReferenceKernels

log = logging.getLogger(__name__)


def _native(device: torch.device) -> Kernels:
    if device.type != "cpu":
        raise ConfigError(f"the native kernels run on cpu, not on {device}; choose --kernels auto")
    # The same number of threads as torch uses.
    return NativeKernels(torch.get_num_threads(), instruction_set())


def _triton(device: torch.device, batch_invariant: bool) -> Kernels:
    try:
        from paceline.kernels.triton_kernels.kernels import TritonKernels
    except ImportError as error:
        raise ConfigError(f"the triton kernels need the packages of `pip install 'paceline[gpu]'`: {error}") from error
    return TritonKernels(device, batch_invariant)


# A backend is one line here. Its factory gets the device, and raises ConfigError if the backend cannot run on it.
_BACKENDS: Mapping[str, Callable[[torch.device], Kernels]] = {
    "reference": lambda device: ReferenceKernels(),
    "native": _native,
    "triton": partial(_triton, batch_invariant=False),
    "triton-invariant": partial(_triton, batch_invariant=True),
}

# The backend that "auto" chooses for a device type. Other device types get the reference.
_PREFERRED: Mapping[str, str] = {"cpu": "native", "cuda": "triton"}


def select_kernels(device: torch.device, backend: str = "auto") -> Kernels:
    """Return the kernels of a backend, made for `device`.

    Args:
        backend: the name of a backend, or "auto" for the fastest that is installed and runs on the device.

    Raises:
        ConfigError: no backend has this name, or it cannot run on this device.
    """
    if backend == "auto":
        return _best(device)
    if backend not in _BACKENDS:
        raise ConfigError(f"unknown kernel backend {backend!r}; known are: {', '.join(['auto', *_BACKENDS])}")
    return _BACKENDS[backend](device)


def kernels_beside() -> Kernels:
    """Return kernels for small operations on the host beside a model's steps: they have one thread of their own, so
    neither waits for the other.
    """
    try:
        return NativeKernels(1, instruction_set())
    except ConfigError:
        return ReferenceKernels()


def instruction_set_of(kernels: Kernels, device: torch.device) -> str:
    """Return the value of `Numerics.instruction_set` for `kernels` on `device`, such as "avx2" or "triton sm_90"."""
    if isinstance(kernels, NativeKernels):
        return kernels.instruction_set
    if device.type == "cuda":
        return "{} sm_{}{}".format(kernels.name, *torch.cuda.get_device_capability(device))
    return f"{kernels.name} {torch.backends.cpu.get_cpu_capability().lower()}"


def rounds_blocks(kernels: Kernels, dtype: torch.dtype) -> bool:
    """Return whether these kernels round quantized weights to `dtype`, so that products have the bits of unpacked
    weights.
    """
    in_integers = isinstance(kernels, NativeKernels) and kernels.instruction_set in INTEGER_PRODUCTS
    return dtype != torch.bfloat16 or not in_integers


def _best(device: torch.device) -> Kernels:
    name = _PREFERRED.get(device.type, "reference")
    try:
        return _BACKENDS[name](device)
    except ConfigError as error:
        log.warning("running on the slow torch reference: %s", error)
        return ReferenceKernels()
