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
_GROUPS = (16, 32, 64, 128)
"""Numbers of values that may share a scale."""
_POWER_BIAS = 127
"""An exponent of 2 in uint8 is stored plus this number (E8M0)."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [out, in] whose weights are value * scale + offset.

    Each weight is rounded to fp32, then to `rounding`, then to `dtype`. Scales, and offsets if there are some, are
    those of groups of 16, 32, 64 or 128 values along `in`: [out, ceil(in / group)]. Only values with a table and floats
    have groups of more than 32.
    """

    values: Tensor
    """int8 [out, in]. Values of 4 bits are from 0 to 15 if there are offsets, else from -8 to 7, and those of 2, 3, 5
    and 6 bits likewise. With a table, they are places in it, from 0 to 15. Of 8 bits, they may also be floats:
    float8_e4m3fn, none of them NaN.
    """
    scales: Tensor
    """fp16, or fp32 of at most 18 significant bits, so that value * scale is exact. Values with a table and floats have
    any scales of fp32; or uint8, for 2 ** (scale - 127); or float8_e4m3fn, times `factors`. If there is an `outer`
    number, they are int8, from 0 to 63 if there are offsets, or from 0 to 15 if these are those of 16 values.
    """
    offsets: Tensor | None
    """In the shape and dtype of the scales. None if there are no offsets."""
    bits: int
    """Bits of each value: 2, 3, 4, 5, 6 or 8."""
    dtype: torch.dtype
    """The dtype in which kernels compute with the matrix."""
    rounding: torch.dtype = torch.bfloat16
    """The dtype to which weights are rounded first: the dtype of the format's own library. For GGUF files it is
    bfloat16, the dtype to which their weights are converted without quantization.
    """
    table: Tensor | None = None
    """fp32 [16]: the numbers that values of 4 bits stand for; None if they stand for themselves."""
    factors: Tensor | None = None
    """fp32 [2]: scales in float8_e4m3fn are multiplied by the first number, then divided by the second one."""
    outer: Tensor | None = None
    """fp16 [out, in / 256]: the number by which the scales of 256 values are multiplied; None if there is none."""
    outer_offsets: Tensor | None = None
    """In the shape of `outer`: the same for the offsets."""
    input_scale: float | None = None
    """If given, kernels round x to signed bytes before the product, and their sums are exact: W8A8. The scale of x; 0
    if each token has its own, with which its largest value is 127. Such a matrix has values of 8 bits without offsets,
    and one scale for each output, fp32 [out, 1].
    """

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def group(self) -> int:
        """Number of values along `in` that share a scale; the least that the shape of the scales can mean."""
        blocks = -(-self.shape[1] // BLOCK)
        groups = self.scales.shape[1]
        if self.input_scale is not None:
            return blocks * BLOCK
        return next(group for group in _GROUPS if -(-blocks * BLOCK // group) == groups)

    def __getitem__(self, outputs: slice | list[int]) -> QuantizedMatrix:
        """Return the matrix of these outputs."""
        return replace(
            self,
            values=self.values[outputs],
            scales=self.scales[outputs],
            offsets=None if self.offsets is None else self.offsets[outputs],
            outer=None if self.outer is None else self.outer[outputs],
            outer_offsets=None if self.outer_offsets is None else self.outer_offsets[outputs],
        )

    def whole_scales(self) -> Tensor:
        """Return the scales as numbers, fp32."""
        if self.scales.dtype == torch.uint8:
            return torch.ldexp(torch.ones(self.scales.shape), self.scales.int() - _POWER_BIAS)
        if self.factors is not None:
            return self.scales.float() * self.factors[0] / self.factors[1]
        return _times(self.scales, self.outer)

    def whole_offsets(self) -> Tensor | None:
        """Return the offsets as numbers, fp32; None if there are none."""
        return None if self.offsets is None else _times(self.offsets, self.outer_offsets)

    def dequantize(self) -> Tensor:
        """Return the matrix [out, in] in `dtype`."""
        size_out, size_in = self.shape
        values = self.values.float() if self.table is None else self.table[self.values.int()]
        values = F.pad(values, (0, -size_in % self.group)).view(size_out, -1, self.group)
        weights = values * self.whole_scales().unsqueeze(2)[:, : values.shape[1]]
        if (offsets := self.whole_offsets()) is not None:
            weights += offsets.unsqueeze(2)[:, : values.shape[1]]
        return weights.view(size_out, -1)[:, :size_in].to(self.rounding).to(self.dtype)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A quantized matrix whose rows are decoded a few at a time. The whole one would take a byte for each value."""

    shape: tuple[int, int]
    """[out, in]"""
    dtype: torch.dtype
    decode: Callable[[slice], QuantizedMatrix]
    """Function from a range of outputs to their matrix."""

    def __getitem__(self, outputs: slice) -> QuantizedMatrix:
        return self.decode(outputs)


def round_to_bytes(x: Tensor, fixed: float = 0.0) -> tuple[Tensor, Tensor]:
    """Round rows [tokens, in] to signed bytes. Return int8 and the scales, fp32 [tokens, 1].

    Args:
        fixed: the scale of all rows; 0 if each row has its own, with which its largest value is 127. A row with a value
            that is not finite has the scale NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True)
    if fixed:
        rounded, scales = wide / fixed, torch.full_like(largest, fixed)
    else:
        # The reciprocal of smaller numbers is not finite, so they count as zeros.
        factor = torch.full_like(largest, 127) / largest  # 127 / largest would be rounded twice
        rounded, scales = wide * torch.where(largest >= 2.0**-100, factor, 0.0), largest / 127
    finite = wide.isfinite().all(1, keepdim=True)
    values = torch.where(finite, rounded, 0.0).clamp(-128, 127).round().to(torch.int8)
    return values, torch.where(finite, scales, torch.nan)


def multiply_bytes(x: Tensor, values: Tensor, scales: Tensor, input_scale: float) -> Tensor:
    """Return the product of rows [tokens, in] and a matrix with an `input_scale`, fp32 [tokens, out].

    The sums are exact. So kernels of other backends give the same bits, for any order of addition.

    Args:
        values, scales: int8 [out, in] and fp32 [out, 1] of the matrix.
    """
    rounded, own = round_to_bytes(x, input_scale)
    sums = rounded.double() @ values.double().t()  # whole numbers far below 2 ** 53
    return sums.float() * scales.float().t() * own


def _times(numbers: Tensor, outer: Tensor | None) -> Tensor:
    """Return numbers [out, n], fp32, times the outer number of each run of them."""
    if outer is None:
        return numbers.float()
    return numbers.float() * outer.float().repeat_interleave(numbers.shape[1] // outer.shape[1], 1)


def quantize_int8(weight: Tensor) -> QuantizedMatrix:
    """Round a matrix [out, in] to signed bytes, with one fp16 scale for each 32 values along `in` (GGUF's Q8_0).

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    return quantize_rows(weight, _int8_rows)


def quantize_rows(weight: Tensor, rounded: Callable[[Tensor], QuantizedMatrix]) -> QuantizedMatrix:
    """Round a matrix [out, in], some rows at a time.

    Args:
        rounded: rounds some rows. Its results have no offsets.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    whole: QuantizedMatrix | None = None
    for rows in parts_of(weight):
        if not weight[rows].isfinite().all():
            raise ValueError("a weight is NaN or infinite")
        part = rounded(weight[rows])
        if whole is None:
            values, scales = (own.new_empty(len(weight), own.shape[1]) for own in (part.values, part.scales))
            whole = replace(part, values=values, scales=scales)
        whole.values[rows], whole.scales[rows] = part.values, part.scales
    assert whole is not None  # a matrix has rows
    return whole


def parts_of(weight: Tensor) -> Iterator[slice]:
    """Yield the rows of a matrix [out, in] that are rounded at a time."""
    size_out, size_in = weight.shape
    count = max(1, _AT_A_TIME // size_in)
    yield from (slice(first, first + count) for first in range(0, size_out, count))


def _int8_rows(weight: Tensor) -> QuantizedMatrix:
    size_out, size_in = weight.shape
    blocks = F.pad(weight.float(), (0, -size_in % BLOCK)).view(size_out, -1, BLOCK)
    # Clamped to the range of fp16. A block whose values are too small for an fp16 scale becomes zero.
    scales = (blocks.abs().amax(2) / 127).clamp(max=torch.finfo(torch.float16).max).half()
    exact = scales.float().unsqueeze(2)
    values = torch.where(exact > 0, blocks / exact, 0.0).round().clamp(-127, 127).to(torch.int8)
    return QuantizedMatrix(values.view(size_out, -1)[:, :size_in], scales, None, 8, weight.dtype)
