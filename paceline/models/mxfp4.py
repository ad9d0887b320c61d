"""Experts in MXFP4: blocks of 32 numbers of 4 bits with one scale, a power of two.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.quantized import QuantizedMatrix
from paceline.models.folder import MXFP4_BLOCKS

BLOCKS, SCALES = MXFP4_BLOCKS, "_scales"
"""Ends of the names of the two tensors that a checkpoint has for a matrix."""
BLOCK_BYTES = 16
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the number that each code of E2M1 stands for."""
_PAIRS = torch.stack((_DOUBLED.repeat(16), _DOUBLED.repeat_interleave(16)), dim=-1).view(torch.int16).flatten()
"""The numbers of the two codes in each byte, int8 [256, 2], as one element each: faster to look up."""
_SCALE_BIAS = 127


def decode_mxfp4(blocks: Tensor, scales: Tensor, size_in: int, dtype: torch.dtype) -> QuantizedMatrix:
    """Return a matrix [out, size_in] without loss, as whole numbers with scales.

    Args:
        blocks: uint8 [out, ceil(size_in / 32), 16]: two codes in each byte, the lower bits first.
        scales: uint8 [out, ceil(size_in / 32)]: exponents of 2, plus 127.
        dtype: the dtype in which kernels compute with the matrix.
    """
    pairs = _PAIRS.index_select(0, blocks.flatten().int())
    values = pairs.view(torch.int8).view(len(blocks), -1)[:, :size_in]
    exponents = scales.int() - _SCALE_BIAS - 1  # half of the scale, because the numbers are doubled
    return QuantizedMatrix(values, torch.ldexp(torch.ones(exponents.shape), exponents), None, 8, dtype)
