"""Copies of small tensors to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device` without waiting for the GPU's earlier work. The tensor must not change
    afterwards.
    """
    # Only from pinned memory can the device copy without the host. torch keeps this memory until the copy has ended.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
