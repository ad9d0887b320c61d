"""Microscaling formats: floats of 4 bits with a power of two for each block, as GPT-OSS stores its experts (MXFP4).

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from paceline.core.online_quantization import E2M1
from paceline.models.formats.base import BYTES, Codes, Json, StoredTensor, has_nan, spread

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BLOCK = 32
_GROUP = 16
"""Number of values of NVFP4 that share a scale."""


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
    """Return a matrix [out, size_in] without loss.

    Args:
        packed: uint8 [out, bytes]: two codes in each byte, the lower bits first.
        scales: uint8 [out, ceil(size_in / 32)]: exponents of 2, plus 127.
    """
    import torch  # here, because processes without torch read configs

    return Codes(_codes(packed, size_in), scales, None, 4, _BLOCK, torch.tensor(E2M1), rounding=torch.float32)


def decode_nvfp4(
    packed: Tensor, scales: Tensor, whole: Tensor, size_in: int, divides: bool, rounding: torch.dtype
) -> Codes | Tensor:
    """Return a matrix [out, size_in] in groups of 16 with a scale each, and one scale for the whole matrix.

    Args:
        packed: as for `decode_mxfp4`.
        scales: float8_e4m3fn [out, ceil(size_in / 16)].
        whole: [1], the number by which scales are multiplied, or divided.
        rounding: the dtype to which weights are rounded.
    """
    import torch

    codes, table = _codes(packed, size_in), torch.tensor(E2M1)
    factors = torch.ones(2)
    factors[int(divides)] = whole.float()
    if not has_nan(scales):
        return Codes(codes, scales, None, 4, _GROUP, table, factors, rounding)
    exact = scales.float() * factors[0] / factors[1]
    return (table[codes.int()] * spread(exact, (1, _GROUP), codes.shape)).to(rounding)


def _codes(packed: Tensor, size_in: int) -> Tensor:
    """Return codes of 4 bits from uint8 [out, bytes]: int8 [out, size_in]."""
    values = packed.new_empty(*packed.shape, 2)
    values[..., 0] = packed & 15
    values[..., 1] = packed >> 4
    return values.char().flatten(1)[:, :size_in]
