"""The matrices of a folder that are in a GGUF file, read from where the file lies."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.models.files.content import read_content
from paceline.models.files.gguf_reference import PlacedMatrix, gguf_files, has_reference, read_reference
from paceline.models.files.read_ahead import TensorPlace, will_read
from paceline.models.folder import weight_files
from paceline.models.gguf.blocks import BLOCK_TYPES, BlockMatrix

_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of types that are not quantized."""


class GgufFile:
    """The matrices of a folder that are in a GGUF file, whose parts are mapped when they are first read.

    Raises:
        ModelError: a part is missing or is not the one that was converted, or the reference cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        reference = read_reference(folder)
        self.matrices = reference.matrices
        """All matrices by their names in the model."""
        self.check_packed = reference.check_packed
        self._files = gguf_files(folder)
        content = read_content({file.name: file for file in self._files})
        reference.check(folder, content)
        self.check_unchanged = content.check
        self._maps: dict[int, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """Return a matrix: uint8 [..., out, bytes] in blocks, or [..., out, in] in the file's dtype.

        Rows have the order of the model. Only matrices that need no other order are views of the mapped file.

        Raises:
            ModelError: the place of the matrix is outside of the file.
        """
        own = self.matrices[name]
        parts = [self._part(own, file, start) for file, start in own.places]
        for part in parts:
            will_read(part)
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        if own.heads:
            order = torch.arange(whole.shape[0]).view(own.heads, -1, 2).transpose(1, 2).reshape(-1)
            whole = whole[order]
        return whole

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that `read` returns."""
        own = self.matrices[name]
        block = BLOCK_TYPES.get(own.type_name)
        *outer, size_in = own.shape
        return (*outer, size_in if block is None else size_in // block.elements * block.bytes)

    def whole(self, name: str) -> Tensor:
        """Return the numbers of a matrix as bf16, in memory of this process."""
        own, found = self.matrices[name], self.read(name)
        if own.type_name not in BLOCK_TYPES:
            return found.to(torch.bfloat16, copy=True)
        rows = BlockMatrix(own.type_name, found.flatten(0, -2), torch.bfloat16)
        return rows.dequantize().view(own.shape)

    def places(self) -> list[TensorPlace]:
        """Return the places of all matrices, in the order of the files."""
        found = [
            TensorPlace(name, self._files[file], start, start + own.part_bytes)
            for name, own in self.matrices.items()
            for file, start in own.places
        ]
        return sorted(found, key=lambda place: (place.file, place.start))

    def _part(self, own: PlacedMatrix, file: int, start: int) -> Tensor:
        """Return the bytes of one place in rows: [..., rows, bytes of a row], or [..., rows, in] if not in blocks."""
        if file not in self._maps:
            self._maps[file] = _map(self._files[file])
        raw = self._maps[file][start : start + own.part_bytes]
        *outer, rows, _ = own.shape
        try:
            if own.type_name in _DTYPES:
                raw = raw.view(_DTYPES[own.type_name])
            return raw.view(*outer, rows // len(own.places), -1)
        except RuntimeError as error:
            raise ModelError(f"{self._files[file]} is damaged: {error}") from error


def _map(file: Path) -> Tensor:
    """Map a file as uint8 [size], to read only."""
    try:
        with file.open("rb") as source:
            mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the tensor must not be written
        return torch.frombuffer(mapped, dtype=torch.uint8)


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder by name. Those in a GGUF file become bf16 in memory of this process."""
    tensors = {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}
    if has_reference(folder):
        matrices = GgufFile(folder)
        tensors |= {name: matrices.whole(name) for name in matrices.matrices}
        matrices.check_unchanged()
    return tensors
