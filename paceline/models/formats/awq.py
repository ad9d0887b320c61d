"""AWQ, as AutoAWQ writes it (layouts "gemm" and "gemv"): codes of 4 bits with a zero and a scale for each group.

Layouts: https://github.com/casper-hansen/AutoAWQ/blob/main/awq/modules/linear
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from paceline.models.formats.base import (
    FLOATS,
    PACKED,
    Codes,
    Json,
    StoredTensor,
    count_field,
    groups_of,
    refuse,
    unpack_words,
    with_zeros,
)

if TYPE_CHECKING:
    from torch import Tensor

_PER_WORD = 8
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each column i of eight, the index of its 4 bits in a word, in the layout gemm."""


class Awq:
    """Matrices of AutoAWQ. Its columns are the outputs in the layout gemm, and the inputs in the layout gemv."""

    name: ClassVar[str] = "AWQ"
    marks: ClassVar[Sequence[str]] = (".qweight",)
    unread: ClassVar[Sequence[str]] = ()

    def __init__(self, config: Json) -> None:
        bits = count_field(config, self.name, "bits", 4)
        version = str(config.get("version", "gemm")).lower()
        if bits != 4:
            raise refuse(self.name, f"in {bits} bits; only 4 are supported")
        if version not in ("gemm", "gemv"):
            raise refuse(self.name, f"in the layout {version}; gemm and gemv are supported")
        self._is_gemm = version == "gemm"
        self._group_size = count_field(config, self.name, "group_size", 128)

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        size_out, size_in = shape
        _, groups = groups_of(self.name, self._group_size, size_in)
        if self._is_gemm:
            words = -(-size_out // _PER_WORD)
            shapes = (size_in, words), (groups, words), (groups, size_out)
        else:
            wide = _gemv_words(groups, self._group_size)
            shapes = (size_out, -(-size_in // _PER_WORD)), (size_out, wide), (size_out, wide * _PER_WORD)
        parts = zip(("qweight", "qzeros", "scales"), shapes, (PACKED, PACKED, FLOATS))
        return {part: StoredTensor(f"{matrix}.{part}", part_shape, dtypes) for part, part_shape, dtypes in parts}

    def weights_in(self, tensor: str, dtype: str, shape: Sequence[int]) -> int:
        return _PER_WORD if tensor.endswith(".qweight") else 0 if tensor.endswith((".qzeros", ".scales")) else 1

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor:
        size_out, size_in = shape
        group, groups = groups_of(self.name, self._group_size, size_in)
        codes, zeros = (unpack_words(tensors[part], 4, 0) for part in ("qweight", "qzeros"))
        scales = tensors["scales"]
        if self._is_gemm:
            codes, zeros = (_reordered(each)[:, :size_out].T.contiguous() for each in (codes, zeros))
            scales = scales.T.contiguous()
        zeros, scales = zeros[:, :groups].short(), scales[:, :groups]
        return with_zeros(codes[:, :size_in], zeros, scales, 4, group)


def _reordered(codes: Tensor) -> Tensor:
    """Put the eight columns of each word in their order: [rows, 8 * words]."""
    return codes.view(len(codes), -1, _PER_WORD)[..., list(_ORDER)].flatten(1)


def _gemv_words(groups: int, group_size: int) -> int:
    """Return the words of a row of zeros. Kernels of AutoAWQ read several words at a time, so rows are padded."""
    words = -(-groups // _PER_WORD)
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    return -(-words // multiple) * multiple
