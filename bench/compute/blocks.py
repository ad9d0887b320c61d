"""Random matrices in the blocks of GGUF files and of AWQ, for measurements: only their form matters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.kernels.quantized import QuantizedMatrix


def _simple(bits: int, has_offsets: bool, is_wide: bool = False) -> Callable[[Tensor], QuantizedMatrix]:
    """Return a function that makes a matrix with a scale for 32 values; fp32 if it is wide, else fp16."""

    def make(weight: Tensor) -> QuantizedMatrix:
        scales = _numbers(len(weight), weight.shape[1] // 32)
        offsets = _numbers(*scales.shape) if has_offsets else None
        if is_wide:
            scales, offsets = scales.float(), None if offsets is None else offsets.float()
        return QuantizedMatrix(_values(weight, bits, has_offsets), scales, offsets, bits, weight.dtype, torch.float16)

    return make


def _k_blocks(bits: int, has_offsets: bool, count: int) -> Callable[[Tensor], QuantizedMatrix]:
    """Return a function that makes a matrix in blocks of 256 values with `count` small scales."""

    def make(weight: Tensor) -> QuantizedMatrix:
        blocks = weight.shape[1] // 256
        least, most = (0, 64) if has_offsets else (-128, 128)
        scales, offsets = torch.randint(least, most, (2, len(weight), count * blocks), dtype=torch.int8)
        outer, outer_offsets = _numbers(len(weight), blocks), _numbers(len(weight), blocks)
        if not has_offsets:
            return QuantizedMatrix(_values(weight, bits, False), scales, None, bits, weight.dtype, outer=outer)
        return QuantizedMatrix(
            *(_values(weight, bits, True), scales, offsets, bits, weight.dtype),
            outer=outer,
            outer_offsets=outer_offsets,
        )

    return make


def _values(weight: Tensor, bits: int, has_offsets: bool) -> Tensor:
    half = 1 << bits - 1
    least, most = (0, 2 * half) if has_offsets and bits < 8 else (-half, half)
    return torch.randint(least, most, tuple(weight.shape), dtype=torch.int8)


def _numbers(*shape: int) -> Tensor:
    return (torch.randn(shape) * 0.01).half()


K_BLOCK = 256
"""Number of values along `in` of which rows of q4_k, q5_k and q6_k have a multiple."""

BLOCKS: dict[str, Callable[[Tensor], QuantizedMatrix]] = {
    "q4_0": _simple(4, has_offsets=False),
    "q5_0": _simple(5, has_offsets=False),
    "awq": _simple(4, has_offsets=True, is_wide=True),
    "q4_k": _k_blocks(4, has_offsets=True, count=8),
    "q5_k": _k_blocks(5, has_offsets=True, count=8),
    "q6_k": _k_blocks(6, has_offsets=False, count=16),
}
