"""Rounding of matrices to fewer bits, for online quantization. Each format is one function of `_ROUND`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.online_quantization import E2M1, OnlineFormat
from paceline.kernels.quantized import BLOCK, QuantizedMatrix, quantize_int8, quantize_rows

_LARGEST_E4M3 = 448.0
_LARGEST_E2M1 = 6.0
_GROUPS = 128, 64
"""Numbers of values that may share a scale if a whole row has the same one."""
_LEAST_EXPONENT = -127
"""The smallest exponent of a scale in E8M0."""
_MOST_EXPONENT = 127
"""The exponent of the largest number of bf16 and fp32."""
_CODES_OF_LARGEST = (-7.6, -8.2, -8.8, -9.4)
"""For 4 bits: the codes that the largest value of a block may get before codes are cut to -8. The one with the smallest
error is found by trying all.
"""


def round_matrix(weight: Tensor, form: OnlineFormat) -> QuantizedMatrix:
    """Return a matrix [out, in] whose weights are rounded to a format.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    return _ROUND[form](weight)


def round_fp8(weight: Tensor) -> QuantizedMatrix:
    """Round to E4M3, with one fp32 scale for each output, at which the largest magnitude becomes 448."""
    return quantize_rows(weight, _fp8_rows)


def round_mxfp8(weight: Tensor) -> QuantizedMatrix:
    """Round to E4M3, with a power of two for each 32 values along `in` (MXFP8 of the Microscaling specification)."""
    return quantize_rows(weight, _mxfp8_rows)


def round_mxfp4(weight: Tensor) -> QuantizedMatrix:
    """Round to E2M1, with a power of two for each 32 values along `in` (MXFP4 of the Microscaling specification)."""
    return quantize_rows(weight, _mxfp4_rows)


def round_int4(weight: Tensor) -> QuantizedMatrix:
    """Round to whole numbers from -8 to 7, with one fp16 scale for each 32 values along `in`.

    Each block gets the scale with the smallest sum of squared errors that a short search finds.
    """
    return quantize_rows(weight, _int4_rows)


_ROUND: Mapping[OnlineFormat, Callable[[Tensor], QuantizedMatrix]] = {
    "fp8": round_fp8,
    "mxfp8": round_mxfp8,
    "mxfp4": round_mxfp4,
    "int8": quantize_int8,
    "int4": round_int4,
}


def _blocks(rows: Tensor) -> Tensor:
    """Return fp32 [out, blocks, 32], with zeros after the last value."""
    return F.pad(rows.float(), (0, -rows.shape[1] % BLOCK)).view(len(rows), -1, BLOCK)


def _unblocked(blocks: Tensor, size_in: int) -> Tensor:
    return blocks.flatten(1)[:, :size_in]


def _to_e4m3(values: Tensor) -> Tensor:
    """Round fp32 values to the nearest number of E4M3, and larger ones to the largest: float8_e4m3fn."""
    return values.clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)


def _floats(
    values: Tensor, scales: Tensor, bits: int, dtype: torch.dtype, table: Tensor | None = None
) -> QuantizedMatrix:
    return QuantizedMatrix(values, scales, None, bits, dtype, rounding=torch.float32, table=table)


def _fp8_rows(rows: Tensor) -> QuantizedMatrix:
    exact = rows.float()
    scales = exact.abs().amax(1, keepdim=True) / _LARGEST_E4M3
    scales = torch.where(scales > 0, scales, 1.0)  # a row of zeros
    size_in = rows.shape[1]
    group = next((group for group in _GROUPS if size_in % group == 0), BLOCK)  # other groups would end in padding
    return _floats(_to_e4m3(exact / scales), scales.expand(-1, -(-size_in // group)), 8, rows.dtype)


def _exponents(blocks: Tensor, exponent: int) -> Tensor:
    """Return the exponent of each block's scale, int32 [out, blocks, 1].

    The largest magnitude of a block gets about the exponent of the largest number of the elements' format. If it is at
    least 1.75 times a power of two, it counts as the next power of two, as in compressed-tensors: else the largest
    weights would be cut by more than they are rounded.

    Args:
        exponent: the exponent of the format's largest number.
    """
    mantissa, powers = torch.frexp(blocks.abs().amax(2, keepdim=True))  # the mantissa is from 0.5 to 1
    exponents = powers - 1 + (mantissa >= 0.875).int() - exponent
    return exponents.clamp(_LEAST_EXPONENT, _MOST_EXPONENT - exponent)


def _mxfp8_rows(rows: Tensor) -> QuantizedMatrix:
    blocks = _blocks(rows)
    exponents = _exponents(blocks, 8)
    values = _to_e4m3(torch.ldexp(blocks, -exponents))
    return _floats(_unblocked(values, rows.shape[1]), _stored(exponents), 8, rows.dtype)


def _mxfp4_rows(rows: Tensor) -> QuantizedMatrix:
    blocks = _blocks(rows)
    exponents = _exponents(blocks, 2)
    magnitudes = torch.ldexp(blocks, -exponents).abs().clamp(max=_LARGEST_E2M1)
    # The distance of neighbouring numbers is 1/2 below 2, 1 below 4, and 2 above. Ties go to the even code.
    steps = torch.where(magnitudes < 2, 0.5, torch.where(magnitudes < 4, 1.0, 2.0))
    rounded = ((magnitudes / steps).round() * steps).flatten(1).contiguous()
    table = torch.tensor(E2M1, device=rows.device)
    codes = torch.bucketize(rounded, table[:8]) + 8 * ((blocks.flatten(1) < 0) & (rounded > 0))
    return _floats(codes.to(torch.int8)[:, : rows.shape[1]], _stored(exponents), 4, rows.dtype, table)


def _stored(exponents: Tensor) -> Tensor:
    """Return exponents as bytes of E8M0: uint8 [out, blocks]."""
    return (exponents.squeeze(2) + 127).to(torch.uint8)


def _int4_rows(rows: Tensor) -> QuantizedMatrix:
    blocks = _blocks(rows)
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scales, gains = torch.zeros_like(largest), torch.zeros_like(largest)
    for code in _CODES_OF_LARGEST:
        codes = (blocks * torch.where(largest != 0, code / largest, 0.0)).round_().clamp_(-8, 7)
        # The best scale for these codes, and the part of the block's sum of squares that is then no error.
        products, squares = ((codes * other).sum(2, keepdim=True) for other in (blocks, codes))
        best = products / squares.clamp(min=1)
        gain = products * best
        scales = torch.where(gain > gains, best, scales)
        gains = torch.maximum(gain, gains)
    limit = torch.finfo(torch.float16).max
    rounded = scales.clamp(-limit, limit).half()
    exact = rounded.float()
    codes = torch.where(exact != 0, blocks / exact, 0.0).round().clamp(-8, 7)
    values = _unblocked(codes.to(torch.int8), rows.shape[1])
    return QuantizedMatrix(values, rounded.squeeze(2), None, 4, rows.dtype)
