"""Quantization of random matrices to floats of 4 and 8 bits, for measurements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.quantized import QuantizedMatrix

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of the codes of MXFP4."""
_NORMAL = torch.special.ndtri(torch.linspace(0.03, 0.97, 16))
"""Numbers that are as dense as those of a normal distribution, like those of NF4."""


def quantize_mxfp4(weight: Tensor) -> QuantizedMatrix:
    """Quantize to E2M1 with a power of two for each 32 values."""
    blocks = weight.float().unflatten(1, (-1, 32))
    exponents = (blocks.abs().amax(2) / 6).log2().ceil() + 127
    codes = _nearest(blocks / torch.exp2(exponents - 127).unsqueeze(2), E2M1)
    return QuantizedMatrix(codes, exponents.byte(), None, 4, weight.dtype, torch.float32, E2M1)


def quantize_nvfp4(weight: Tensor) -> QuantizedMatrix:
    """Quantize to E2M1 with a scale in E4M3 for each 16 values, and one number for the matrix."""
    blocks = weight.float().unflatten(1, (-1, 16))
    whole = float(blocks.abs().max()) / (6 * 448)
    scales = (blocks.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    codes = _nearest(blocks / (scales.float() * whole).clamp(min=1e-9).unsqueeze(2), E2M1)
    factors = torch.tensor([whole, 1.0])
    return QuantizedMatrix(codes, scales, None, 4, weight.dtype, torch.float32, E2M1, factors)


def quantize_nf4(weight: Tensor) -> QuantizedMatrix:
    """Quantize to a table of numbers that are not whole, with a scale for each 64 values."""
    blocks = weight.float().unflatten(1, (-1, 64))
    scales = blocks.abs().amax(2)
    table = _NORMAL / _NORMAL.max()
    codes = _nearest(blocks / scales.unsqueeze(2), table)
    return QuantizedMatrix(codes, scales, None, 4, weight.dtype, torch.bfloat16, table)


def quantize_fp8(weight: Tensor) -> QuantizedMatrix:
    """Quantize to E4M3 with a scale for each output and 128 values."""
    blocks = F.pad(weight.float(), (0, -weight.shape[1] % 128)).unflatten(1, (-1, 128))
    scales = blocks.abs().amax(2) / 448
    values = (blocks / scales.unsqueeze(2)).flatten(1)[:, : weight.shape[1]].to(torch.float8_e4m3fn)
    return QuantizedMatrix(values, scales, None, 8, weight.dtype, torch.float32)


def quantize_mxfp8(weight: Tensor) -> QuantizedMatrix:
    """Quantize to E4M3 with a power of two for each 32 values."""
    blocks = weight.float().unflatten(1, (-1, 32))
    exponents = (blocks.abs().amax(2) / 448).log2().ceil() + 127
    values = (blocks / torch.exp2(exponents - 127).unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn)
    return QuantizedMatrix(values, exponents.byte(), None, 8, weight.dtype, torch.bfloat16)


def _nearest(blocks: Tensor, table: Tensor) -> Tensor:
    """Return the place of the nearest number of the table: int8 [out, in] for blocks [out, blocks, values]."""
    order = table.argsort()
    borders = (table[order][1:] + table[order][:-1]) / 2
    return order[torch.bucketize(blocks, borders)].to(torch.int8).flatten(1)
