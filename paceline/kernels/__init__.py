"""Every hot operation, once for each kind of machine. `select_kernels` is the only dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paceline.core.errors import ConfigError
from paceline.kernels.interface import Kernels
from paceline.kernels.reference import ReferenceKernels

# A backend is one line here. Its maker gets the device and raises ConfigError where it cannot run there.
_BACKENDS: Mapping[str, Callable[[torch.device], Kernels]] = {
    "reference": lambda device: ReferenceKernels(),
}

# What "auto" means on a device type; all others get the reference.
_PREFERRED: Mapping[str, str] = {}


def select_kernels(device: torch.device, backend: str = "auto") -> Kernels:
    """Makes the kernels that run on `device`.

    Args:
        backend: a known name, or "auto" for the fastest one that fits the device.

    Raises:
        ConfigError: no backend has this name, or it cannot run on this device.
    """
    name = _PREFERRED.get(device.type, "reference") if backend == "auto" else backend
    if name not in _BACKENDS:
        raise ConfigError(f"unknown kernel backend {name!r}; known are: {', '.join(['auto', *_BACKENDS])}")
    return _BACKENDS[name](device)
