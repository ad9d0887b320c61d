"""What several kernels compute with."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """a @ b + acc in fp32, without TF32."""
    if INTERPRETED:
        # Triton's interpreter multiplies the bits of bf16 as if they were integers. The products are the same.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
