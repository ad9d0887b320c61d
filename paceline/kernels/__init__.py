"""Every hot operation, once for each kind of machine. `select_kernels` is the only dispatch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

import torch

from paceline.core.errors import ConfigError
from paceline.kernels.interface import Kernels
from paceline.kernels.native import NativeKernels
from paceline.kernels.reference import ReferenceKernels

log = logging.getLogger(__name__)


def _native(device: torch.device) -> Kernels:
    if device.type != "cpu":
        raise ConfigError(f"the native kernels run on cpu, not on {device}; choose --kernels auto")
    # As many threads as torch was told to use.
    return NativeKernels(torch.get_num_threads())


def _triton(device: torch.device, batch_invariant: bool) -> Kernels:
    try:
        from paceline.kernels.triton_kernels.kernels import TritonKernels
    except ImportError as error:
        raise ConfigError(f"the triton kernels need what `pip install 'paceline[gpu]'` installs: {error}") from error
    return TritonKernels(device, batch_invariant)


# A backend is one line here. Its maker gets the device and raises ConfigError where it cannot run there.
_BACKENDS: Mapping[str, Callable[[torch.device], Kernels]] = {
    "reference": lambda device: ReferenceKernels(),
    "native": _native,
    "triton": partial(_triton, batch_invariant=False),
    "triton-invariant": partial(_triton, batch_invariant=True),
}

# What "auto" means on a device type; all others get the reference.
_PREFERRED: Mapping[str, str] = {"cpu": "native", "cuda": "triton"}


def select_kernels(device: torch.device, backend: str = "auto") -> Kernels:
    """Makes the kernels that run on `device`.

    Args:
        backend: a known name, or "auto" for the fastest one that fits the device and is installed.

    Raises:
        ConfigError: no backend has this name, or it cannot run on this device.
    """
    if backend == "auto":
        return _best(device)
    if backend not in _BACKENDS:
        raise ConfigError(f"unknown kernel backend {backend!r}; known are: {', '.join(['auto', *_BACKENDS])}")
    return _BACKENDS[backend](device)


def _best(device: torch.device) -> Kernels:
    name = _PREFERRED.get(device.type, "reference")
    try:
        return _BACKENDS[name](device)
    except ConfigError as error:
        log.warning("running on the slow torch reference: %s", error)
        return ReferenceKernels()
