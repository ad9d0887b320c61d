"""Rounding of matrices to fewer bits, for online quantization. Each format is one function of `_ROUND`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.online_quantization import OnlineFormat
from paceline.kernels.quantized import BLOCK, QuantizedMatrix, parts_of, quantize_int8, quantize_rows

_LARGEST_E4M3 = 448.0
_LARGEST_E2M1 = 6.0
_LEAST_EXPONENT = -127
"""The smallest exponent of a scale in E8M0."""
_MOST_EXPONENT = 127
"""The exponent of the largest number of bf16 and fp32."""
_CODES_OF_LARGEST = (-7.6, -8.2, -8.8, -9.4)
"""For 4 bits: the codes that the largest value of a block may get before codes are cut to -8. The one with the smallest
error is found by trying all.
"""


def round_matrix(weight: Tensor, form: OnlineFormat) -> Tensor | QuantizedMatrix:
    """Return a matrix [out, in] whose weights are rounded to a format.

    Formats whose codes are whole numbers are returned as codes. Floats of 8 bits are returned as a tensor in the dtype
    of `weight`, until kernels read them by themselves.
    """
    return _ROUND[form](weight)


def round_fp8(weight: Tensor) -> Tensor:
    """Round to E4M3, with one fp32 scale for each output, at which the largest magnitude becomes 448."""
    return _by_rows(weight, _fp8_rows)


def round_mxfp8(weight: Tensor) -> Tensor:
    """Round to E4M3, with a power of two for each 32 values along `in` (MXFP8 of the Microscaling specification)."""
    return _by_rows(weight, _mxfp8_rows)


def round_mxfp4(weight: Tensor) -> QuantizedMatrix:
    """Round to E2M1, with a power of two for each 32 values along `in` (MXFP4 of the Microscaling specification)."""
    return quantize_rows(weight, 8, torch.float32, _mxfp4_rows)


def round_int4(weight: Tensor) -> QuantizedMatrix:
    """Round to whole numbers from -8 to 7, with one fp16 scale for each 32 values along `in`.

    Each block gets the scale with the smallest sum of squared errors that a short search finds.
    """
    return quantize_rows(weight, 4, torch.float16, _int4_rows)


_ROUND: Mapping[OnlineFormat, Callable[[Tensor], Tensor | QuantizedMatrix]] = {
    "fp8": round_fp8,
    "mxfp8": round_mxfp8,
    "mxfp4": round_mxfp4,
    "int8": quantize_int8,
    "int4": round_int4,
}


def _by_rows(weight: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for rows in parts_of(weight):
        out[rows] = rounded(weight[rows])
    return out


def _blocks(rows: Tensor) -> Tensor:
    """Return fp32 [out, blocks, 32], with zeros after the last value."""
    return F.pad(rows.float(), (0, -rows.shape[1] % BLOCK)).view(len(rows), -1, BLOCK)


def _unblocked(blocks: Tensor, size_in: int) -> Tensor:
    return blocks.flatten(1)[:, :size_in]


def _to_e4m3(values: Tensor) -> Tensor:
    """Round fp32 values to the nearest number of E4M3, and larger ones to the largest: fp32."""
    return values.clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn).float()


def _fp8_rows(rows: Tensor) -> Tensor:
    exact = rows.float()
    scales = exact.abs().amax(1, keepdim=True) / _LARGEST_E4M3
    scales = torch.where(scales > 0, scales, 1.0)  # a row of zeros
    return _to_e4m3(exact / scales) * scales


def _powers(blocks: Tensor, exponent: int) -> Tensor:
    """Return the scale of each block, fp32 [out, blocks, 1].

    The largest magnitude of a block gets about the exponent of the largest number of the elements' format. If it is at
    least 1.75 times a power of two, it counts as the next power of two, as in compressed-tensors: else the largest
    weights would be cut by more than they are rounded.

    Args:
        exponent: the exponent of the format's largest number.
    """
    mantissa, powers = torch.frexp(blocks.abs().amax(2, keepdim=True))  # the mantissa is from 0.5 to 1
    exponents = powers - 1 + (mantissa >= 0.875).int() - exponent
    return torch.ldexp(torch.ones_like(mantissa), exponents.clamp(_LEAST_EXPONENT, _MOST_EXPONENT - exponent))


def _mxfp8_rows(rows: Tensor) -> Tensor:
    blocks = _blocks(rows)
    scales = _powers(blocks, 8)
    return _unblocked(_to_e4m3(blocks / scales) * scales, rows.shape[1])


def _mxfp4_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return twice the rounded values without their scale, int8, and half the scales, fp32 [out, blocks]."""
    blocks = _blocks(rows)
    scales = _powers(blocks, 2)
    magnitudes = (blocks / scales).abs().clamp(max=_LARGEST_E2M1)
    # The distance of neighbouring numbers is 1/2 below 2, 1 below 4, and 2 above. Ties go to the even code.
    steps = torch.where(magnitudes < 2, 0.5, torch.where(magnitudes < 4, 1.0, 2.0))
    doubled = (magnitudes / steps).round() * (2 * steps)
    values = (doubled * blocks.sign()).to(torch.int8)
    return _unblocked(values, rows.shape[1]), scales.squeeze(2) / 2


def _int4_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, int8, and their scales, fp16 [out, blocks]."""
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
    return _unblocked(codes.to(torch.int8), rows.shape[1]), rounded.squeeze(2)
