"""Microscaling formats: floats of 4 bits with a power of two for each block, as GPT-OSS stores its experts (MXFP4).

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from paceline.models.formats.base import BYTES, Codes, Json, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 32
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the number that each code of E2M1 stands for."""
_SCALE_BIAS = 127


class MxFp4:
    """The experts of GPT-OSS: one tensor with the blocks of all experts, and one with their scales."""

    name: ClassVar[str] = "MXFP4"
    marks: ClassVar[Sequence[str]] = ("_blocks",)
    unread: ClassVar[Sequence[str]] = ()

    def __init__(self, config: Json) -> None:
        pass

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        size_out, size_in = shape
        blocks = -(-size_in // _BLOCK)
        return {
            "blocks": StoredTensor(f"{matrix}_blocks", (size_out, blocks, _BLOCK // 2), BYTES),
            "scales": StoredTensor(f"{matrix}_scales", (size_out, blocks), BYTES),
        }

    def weights_in(self, tensor: str, dtype: str, shape: Sequence[int]) -> int:
        return 2 if tensor.endswith("_blocks") else 0 if dtype == "U8" else 1

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        return decode_mxfp4(tensors["blocks"].flatten(1), tensors["scales"], shape[1])


def decode_mxfp4(packed: Tensor, scales: Tensor, size_in: int) -> Codes:
    """Return a matrix [out, size_in] without loss, as whole numbers with scales.

    Args:
        packed: uint8 [out, bytes]: two codes in each byte, the lower bits first.
        scales: uint8 [out, ceil(size_in / 32)]: exponents of 2, plus 127.
    """
    return Codes(_doubled(packed)[:, :size_in], powers(scales) / 2, None, 8, _BLOCK)


def floats_of_4_bits(packed: Tensor, size_in: int) -> Tensor:
    """Return the numbers that codes of E2M1 stand for, fp32 [out, size_in]. `packed` is as for `decode_mxfp4`."""
    return _doubled(packed)[:, :size_in].float() / 2


def powers(exponents: Tensor) -> Tensor:
    """Return 2 ** (exponent - 127), fp32, for exponents in uint8 (E8M0)."""
    import torch  # here, because processes without torch read configs

    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - _SCALE_BIAS)


def _doubled(packed: Tensor) -> Tensor:
    """Return twice the numbers of codes in uint8 [out, bytes]: int8 [out, 2 * bytes]."""
    import torch

    # The numbers of both codes of a byte are looked up as one element of two bytes, which is faster.
    pairs = [(_DOUBLED[byte & 15], _DOUBLED[byte >> 4]) for byte in range(256)]
    table = torch.tensor(pairs, dtype=torch.int8).view(torch.int16).flatten()
    return table.index_select(0, packed.flatten().int()).view(torch.int8).view(len(packed), -1)
