"""Quantized matrices: blocks of small whole numbers with scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32
"""Number of values of one block, along the dimension `in`."""
_AT_A_TIME = 1 << 18
"""Number of weights that are rounded at a time. Intermediate values are fp32, and fit in a core's cache."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [out, in] whose weights are value * scale + offset.

    Each weight is rounded to fp32, then to `rounding`, then to `dtype`.
    """

    values: Tensor
    """int8 [out, in]. Values of 4 bits are from 0 to 15 if there are offsets, else from -8 to 7."""
    scales: Tensor
    """[out, ceil(in / 32)], or twice as many: one for each 16 values. fp16, or fp32 of at most 18 significant bits, so
    that value * scale is exact."""
    offsets: Tensor | None
    """In the shape and dtype of the scales. With offsets, a block has only one scale. None if there are no offsets."""
    bits: int
    """Bits of each value: 4 or 8."""
    dtype: torch.dtype
    """The dtype in which kernels compute with the matrix."""
    rounding: torch.dtype = torch.bfloat16
    """The dtype to which weights are rounded first: the dtype of the format's own library. For GGUF files it is
    bfloat16, the dtype to which their weights are converted without quantization.
    """

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def __getitem__(self, outputs: slice | list[int]) -> QuantizedMatrix:
        """Return the matrix of these outputs."""
        offsets = None if self.offsets is None else self.offsets[outputs]
        return replace(self, values=self.values[outputs], scales=self.scales[outputs], offsets=offsets)

    def dequantize(self) -> Tensor:
        """Return the matrix [out, in] in `dtype`."""
        size_out, size_in = self.values.shape
        blocks = -(-size_in // BLOCK)
        per_scale = blocks * BLOCK // self.scales.shape[1]
        values = F.pad(self.values, (0, blocks * BLOCK - size_in)).float().view(size_out, -1, per_scale)
        weights = values * self.scales.float().unsqueeze(2)
        if self.offsets is not None:
            weights += self.offsets.float().unsqueeze(2)
        return weights.view(size_out, -1)[:, :size_in].to(self.rounding).to(self.dtype)


def quantize_int8(weight: Tensor) -> QuantizedMatrix:
    """Round a matrix [out, in] to signed bytes, with one fp16 scale for each 32 values along `in` (GGUF's Q8_0)."""
    return quantize_rows(weight, 8, torch.float16, _int8_rows)


def quantize_rows(
    weight: Tensor, bits: int, scale_dtype: torch.dtype, rounded: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> QuantizedMatrix:
    """Round a matrix [out, in] without offsets, some rows at a time.

    Args:
        rounded: returns the values and the scales of some rows, in the shapes of `QuantizedMatrix`.
    """
    size_out, size_in = weight.shape
    values = torch.empty(size_out, size_in, dtype=torch.int8, device=weight.device)
    scales = torch.empty(size_out, -(-size_in // BLOCK), dtype=scale_dtype, device=weight.device)
    for rows in parts_of(weight):
        values[rows], scales[rows] = rounded(weight[rows])
    return QuantizedMatrix(values, scales, None, bits, weight.dtype)


def parts_of(weight: Tensor) -> Iterator[slice]:
    """Yield the rows of a matrix [out, in] that are rounded at a time."""
    size_out, size_in = weight.shape
    count = max(1, _AT_A_TIME // size_in)
    yield from (slice(first, first + count) for first in range(0, size_out, count))


def _int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    size_out, size_in = weight.shape
    blocks = F.pad(weight.float(), (0, -size_in % BLOCK)).view(size_out, -1, BLOCK)
    # Clamped to the range of fp16. A block whose values are too small for an fp16 scale becomes zero.
    scales = (blocks.abs().amax(2) / 127).clamp(max=torch.finfo(torch.float16).max).half()
    exact = scales.float().unsqueeze(2)
    values = torch.where(exact > 0, blocks / exact, 0.0).round().clamp(-127, 127).to(torch.int8)
    return values.view(size_out, -1)[:, :size_in], scales
