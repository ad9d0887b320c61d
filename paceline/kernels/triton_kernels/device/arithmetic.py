"""Arithmetic that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton_kernels.device import INTERPRETED as _INTERPRETED_HERE

_INTERPRETED = tl.constexpr(_INTERPRETED_HERE)


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Round fp32 to the nearest number of DTYPE, as torch does."""
    if _INTERPRETED and DTYPE.is_bf16():
        # Triton's interpreter rounds ties up and loses a carry into the exponent. It keeps exact numbers.
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """Return a @ b + acc in fp32, without TF32."""
    if INTERPRETED:
        # Triton's interpreter multiplies the bits of bf16 as if they were integers. The products are the same.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
