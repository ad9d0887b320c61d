"""Launches of the products of low-rank adapters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.adapters import FIELDS, AdaptedLayer
from paceline.kernels.triton_kernels.device import adapters as device

_BLOCK = 128
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def adapt(y: Tensor, x: Tensor, layer: AdaptedLayer, rows: Tensor) -> None:
    """Compute `AdapterKernels.adapt`."""
    largest = max((len(part.down) for part in layer.parts if part is not None), default=0)
    if not largest or not len(rows):
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, size_in), size_out, ranks = x.shape, y.shape[1], triton.next_power_of_2(largest)
    sums = torch.empty(tokens, ranks, dtype=torch.float32, device=x.device)
    shape = {"FIELDS": FIELDS, "DTYPE": _DTYPES[layer.dtype], "RANKS": ranks}
    device.shrink[tokens,](sums, x, layer.slots, rows, x.stride(0), SIZE_IN=size_in, STEP=_BLOCK, **shape)
    device.expand[tokens, triton.cdiv(size_out, _BLOCK)](
        y, sums, layer.slots, rows, SIZE_OUT=size_out, BLOCK=_BLOCK, **shape
    )
