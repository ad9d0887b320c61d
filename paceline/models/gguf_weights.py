"""`Weights` of a folder that was converted from a GGUF file and whose matrices are in that file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.kernels.packed_weight import PackedWeight
from paceline.models.base import FusedExperts
from paceline.models.checkpoint import Checkpoint
from paceline.models.files.read_ahead import Lookahead
from paceline.models.gguf.blocks import BLOCK_TYPES, BlockMatrix
from paceline.models.gguf.file import GgufFile
from paceline.models.packing.quantized import Matrix


class GgufWeights:
    """Small tensors from the folder's safetensors, and matrices from the GGUF file.

    Quantized matrices are blocks until they are packed. Dequantized, they have the numbers that the file stands for,
    rounded to bf16. Matrices that are not quantized are rounded to bf16, too.

    Args:
        checkpoint: the folder's safetensors.
        file: the matrices in the GGUF file.
        device: the model's device.
    """

    def __init__(self, checkpoint: Checkpoint, file: GgufFile, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self.linears = checkpoint.linears
        self._file = file
        self._device = device
        self._left = dict(file.matrices)
        self._lookahead = Lookahead(file.places() if checkpoint.pack.needs_content else ())
        self.take_table = checkpoint.take_table
        # No architecture that we convert has such matrices.
        self.take_packed_derived = checkpoint.take_packed_derived

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self._left:
            return self._checkpoint.take(name, *shape, dtype=dtype)
        self._take(name, shape)
        return self._file.whole(name).to(self._device, dtype or self._checkpoint.dtype)

    def take_packed(self, name: str, *shape: int, order: Sequence[int] | None = None) -> PackedWeight:
        if name not in self._left:
            return self._checkpoint.take_packed(name, *shape, order=order)
        rows = self._read(name, shape)
        return self._pack(name, name, rows if order is None else rows[list(order)])

    def take_packed_parts(
        self, name: str, sizes_out: Sequence[int], size_in: int, order: Sequence[int] | None = None
    ) -> list[PackedWeight]:
        if name not in self._left:
            return self._checkpoint.take_packed_parts(name, sizes_out, size_in, order)
        rows = self._read(name, (sum(sizes_out), size_in))
        parts = torch.split(rows if order is None else rows[list(order)], list(sizes_out))
        return [self._pack(name, f"{name}[{index}]", part) for index, part in enumerate(parts)]

    def take_packed_experts(self, name: str, shape: FusedExperts) -> list[list[PackedWeight]]:
        if name not in self._left:
            return self._checkpoint.take_packed_experts(name, shape)
        packed = [
            [self._pack(name, f"{name}[{expert}][{index}]", part) for index, part in enumerate(shape.parts(rows))]
            for expert, rows in enumerate(self._read(name, shape.shape))
        ]
        return [list(part) for part in zip(*packed)]

    def has(self, name: str, *shape: int) -> bool:
        if name not in self._left:
            return self._checkpoint.has(name, *shape)
        return not shape or self._left[name].shape == shape

    def is_one_matrix(self, name: str, other: str) -> bool:
        # The converter's config says that two matrices are one only if the file has one.
        return not (self.has(name) and self.has(other))

    def finish(self, unread: Sequence[str] = ()) -> None:
        """Close the files. Arguments and errors are those of `Checkpoint.finish`. Raise ModelError, too, if the GGUF
        file has changed meanwhile.
        """
        self._checkpoint.finish(unread, tuple(self._left))
        self._file.check_unchanged()

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        """Take a matrix, which must have this shape."""
        found = self._left.pop(name).shape
        if found != shape:
            raise ModelError(
                f"the GGUF file does not fit config.json: {name} is {list(found)} instead of {list(shape)}"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Take a matrix, or the matrices of all experts: uint8 [..., out, bytes] in blocks, or [..., out, in]."""
        self._take(name, shape)
        if not self._checkpoint.pack.needs_content:
            return torch.empty(self._file.shape(name), dtype=torch.uint8, device="meta")
        self._lookahead.take(name)
        return self._file.read(name)

    def _pack(self, tensor: str, name: str, rows: Tensor) -> PackedWeight:
        """Pack some rows of a tensor as the matrix `name`."""
        dtype, type_name = self._checkpoint.dtype, self._file.matrices[tensor].type_name
        matrix: Matrix
        if type_name in BLOCK_TYPES:
            matrix = BlockMatrix(type_name, rows, dtype)
        elif rows.is_meta:
            matrix = rows.to(dtype)
        else:
            # A copy, because a packed matrix must not need the file any more.
            matrix = rows.to(torch.bfloat16, copy=True).to(self._device, dtype)
        return self._checkpoint.pack(name, matrix)
