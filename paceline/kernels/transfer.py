"""Bringing small tensors to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`. The host does not wait for what a GPU still computes; the tensor must not change."""
    # Only from pinned memory is the copy one for the device alone. torch keeps that memory until it was made.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
