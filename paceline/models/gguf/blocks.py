"""The decoding of GGUF's quantized blocks into whole numbers with scales.

Layouts: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.quantized import QuantizedMatrix

_PIECE = 1 << 20
"""Number of weights that are dequantized at a time."""


class Numbers(NamedTuple):
    """The parts of `QuantizedMatrix`, each [rows, blocks, numbers of a block]."""

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int
    outer: Tensor | None = None
    outer_offsets: Tensor | None = None
    table: Tensor | None = None


_NON_LINEAR = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
"""The numbers that the codes of IQ4_NL and IQ4_XS stand for."""


def _halves(raw: Tensor, first: int, count: int = 1) -> Tensor:
    """Return `count` fp16 numbers from byte `first` of each block: [rows, blocks, count]."""
    return raw[..., first : first + 2 * count].contiguous().view(torch.float16)


def _split(raw: Tensor, *sizes: int) -> Tensor:
    """Cut the last dimension into several of these sizes."""
    return raw.reshape(*raw.shape[:-1], *sizes)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack bytes [..., n] to [..., 2 * n]: first all lower nibbles, then all upper ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _planes(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes of 1 or 2 bits from bytes [..., n] to [..., 8 / bits, n]: first the lowest bits of all bytes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(1)
    return packed.unsqueeze(-2) >> shifts & (1 << bits) - 1


def _fifth_bits(raw: Tensor) -> Tensor:
    """Return the 32 bits of four bytes, each as 0 or 16: [rows, blocks, 32]."""
    return (raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _q4_0(raw: Tensor) -> Numbers:
    return Numbers(_nibbles(raw[..., 2:]).to(torch.int8) - 8, _halves(raw, 0), None, 4)


def _q4_1(raw: Tensor) -> Numbers:
    return Numbers(_nibbles(raw[..., 4:]).to(torch.int8), _halves(raw, 0), _halves(raw, 2), 4)


def _q5_0(raw: Tensor) -> Numbers:
    return Numbers((_nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])).to(torch.int8) - 16, _halves(raw, 0), None, 5)


def _q5_1(raw: Tensor) -> Numbers:
    values = _nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])
    return Numbers(values.to(torch.int8), _halves(raw, 0), _halves(raw, 2), 5)


def _q8_0(raw: Tensor) -> Numbers:
    return Numbers(raw[..., 2:].contiguous().view(torch.int8), _halves(raw, 0), None, 8)


def _iq4_nl(raw: Tensor) -> Numbers:
    return Numbers(_nibbles(raw[..., 2:]).char(), _halves(raw, 0), None, 4, table=_NON_LINEAR)


def _iq4_xs(raw: Tensor) -> Numbers:
    # The low nibbles of two scales are in a byte, the other two bits of four scales in another one.
    low = torch.stack((raw[..., 4:8] & 15, raw[..., 4:8] >> 4), dim=-1).flatten(-2)
    high = _planes(raw[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    values = _nibbles(_split(raw[..., 8:], 8, 16)).flatten(-2)
    scales = (low | high << 4).char() - 32
    return Numbers(values.char(), scales, None, 4, _halves(raw, 0), table=_NON_LINEAR)


def _q2_k(raw: Tensor) -> Numbers:
    values = _planes(_split(raw[..., 16:80], 2, 32), 2).flatten(-3)
    scales, offsets = raw[..., :16] & 15, raw[..., :16] >> 4
    return Numbers(values.char(), scales.char(), offsets.char(), 2, _halves(raw, 80), -_halves(raw, 82))


def _q3_k(raw: Tensor) -> Numbers:
    third = _planes(raw[..., :32], 1).flatten(-2)
    values = _planes(_split(raw[..., 32:96], 2, 32), 2).flatten(-3) | third << 2
    low, high = _nibbles(raw[..., 96:104]), _planes(raw[..., 104:108], 2).flatten(-2)
    return Numbers(values.char() - 4, (low | high << 4).char() - 32, None, 3, _halves(raw, 108))


def _with_k_scales(values: Tensor, raw: Tensor, bits: int) -> Numbers:
    """Return values with the scales and offsets of eight parts, from two fp16 and twelve bytes of 6-bit numbers."""
    mixed_bits, low, high = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat((mixed_bits & 63, high & 15 | mixed_bits >> 6 << 4), dim=-1)
    offsets = torch.cat((low & 63, high >> 4 | low >> 6 << 4), dim=-1)
    return Numbers(values.char(), scales.char(), offsets.char(), bits, _halves(raw, 0), -_halves(raw, 2))


def _q4_k(raw: Tensor) -> Numbers:
    return _with_k_scales(_nibbles(_split(raw[..., 16:], 4, 32)).flatten(-2), raw, 4)


def _q5_k(raw: Tensor) -> Numbers:
    values = _split(_nibbles(_split(raw[..., 48:], 4, 32)), 2, 32).flatten(-3, -2)
    return _with_k_scales((values | _planes(raw[..., 16:48], 1) << 4).flatten(-2), raw, 5)


def _q6_k(raw: Tensor) -> Numbers:
    low = _split(raw[..., :128], 2, 1, 64)
    high = _planes(_split(raw[..., 128:192], 2, 32), 2)
    values = _split(_nibbles(low), 4, 32).squeeze(-3) | high << 4
    scales = raw[..., 192:208].contiguous().view(torch.int8)
    return Numbers(values.flatten(-3).to(torch.int8) - 32, scales, None, 6, _halves(raw, 208))


@dataclass(frozen=True, slots=True)
class BlockType:
    """A quantized type of GGUF."""

    elements: int
    """Weights in one block."""
    bytes: int
    decode: Callable[[Tensor], Numbers]
    """Function from blocks, uint8 [rows, blocks, bytes], to their `Numbers`."""


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q8_0": BlockType(32, 34, _q8_0),
    "IQ4_NL": BlockType(32, 18, _iq4_nl),
    "IQ4_XS": BlockType(256, 136, _iq4_xs),
    "Q2_K": BlockType(256, 84, _q2_k),
    "Q3_K": BlockType(256, 110, _q3_k),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
}


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix [out, in] in blocks. It is decoded when it is packed."""

    type_name: str
    """The quantized type, a key of BLOCK_TYPES."""
    raw: Tensor
    """uint8 [out, bytes]: each row in whole blocks."""
    dtype: torch.dtype
    """The dtype in which kernels compute with the matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        block = BLOCK_TYPES[self.type_name]
        return len(self.raw), self.raw.shape[1] // block.bytes * block.elements

    def decode(self, outputs: slice = slice(None)) -> QuantizedMatrix:
        """Return the matrix of these outputs as whole numbers with scales, without loss."""
        block, raw = BLOCK_TYPES[self.type_name], self.raw[outputs]
        found = block.decode(raw.view(len(raw), -1, block.bytes))
        values, scales, offsets, outer, outer_offsets = (
            None if part is None else part.flatten(1)
            for part in (found.values, found.scales, found.offsets, found.outer, found.outer_offsets)
        )
        assert values is not None
        assert scales is not None
        return QuantizedMatrix(
            values,
            scales,
            offsets,
            found.bits,
            self.dtype,
            table=found.table,
            outer=outer,
            outer_offsets=outer_offsets,
        )

    def dequantize(self) -> Tensor:
        """Return the matrix in its dtype: [out, in]. Few rows at a time are in a wider form."""
        size_out, size_in = self.shape
        numbers = torch.empty(size_out, size_in, dtype=self.dtype)
        count = max(1, _PIECE // size_in)
        for first in range(0, size_out, count):
            rows = slice(first, first + count)
            numbers[rows] = self.decode(rows).dequantize()
        return numbers
