"""`Weights` with the blocks of a GGUF file in place of the matrices that were converted from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.config import Quantization
from paceline.core.errors import ConfigError, ModelError
from paceline.kernels.packed_weight import PackedWeight
from paceline.models.base import FusedExperts, Weights
from paceline.models.checkpoint import Checkpoint
from paceline.models.folder import BLOCKS_FILE
from paceline.models.gguf_blocks import BLOCK_TYPES, BlockMatrix
from paceline.models.read_ahead import Lookahead, will_read


def weights_of(checkpoint: Checkpoint, folder: Path, quantization: Quantization) -> Weights:
    """Return the checkpoint's weights, with the folder's blocks in place of their matrices if `quantization` says so.

    Raises:
        ConfigError: the folder has no blocks.
        ModelError: the folder's blocks cannot be read.
    """
    return GgufWeights(checkpoint, folder / BLOCKS_FILE) if quantization == "gguf" else checkpoint


class GgufWeights:
    """Weights of a converted GGUF file, as the file's own blocks. Dequantized, they equal the checkpoint's matrices bit
    for bit.
    """

    def __init__(self, checkpoint: Checkpoint, file: Path) -> None:
        if not file.is_file():
            raise ConfigError(
                f"--quantization gguf: {file.parent} was not converted from a GGUF file, or an older version converted "
                "it; give serve or prepare the .gguf file or a bundled model's name, or choose --quantization int8"
            )
        self._checkpoint = checkpoint
        self._file = file
        self.take, self.take_table = checkpoint.take, checkpoint.take_table
        self.has, self.is_one_matrix = checkpoint.has, checkpoint.is_one_matrix
        # No architecture that we convert has such matrices.
        self.take_packed_derived = checkpoint.take_packed_derived
        try:
            self._blocks: Any = safe_open(file, framework="pt", device="cpu")
            self._types = _types(self._blocks)
            self._lookahead = Lookahead([file] if checkpoint.pack.needs_content else ())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged: {error}") from error

    def take_packed(self, name: str, *shape: int, order: Sequence[int] | None = None) -> PackedWeight:
        if name not in self._types:
            return self._checkpoint.take_packed(name, *shape, order=order)
        raw = self._take_raw(name, shape)
        return self._pack(name, name, raw if order is None else raw[list(order)])

    def take_packed_parts(
        self, name: str, sizes_out: Sequence[int], size_in: int, order: Sequence[int] | None = None
    ) -> list[PackedWeight]:
        if name not in self._types:
            return self._checkpoint.take_packed_parts(name, sizes_out, size_in, order)
        raw = self._take_raw(name, (sum(sizes_out), size_in))
        parts = torch.split(raw if order is None else raw[list(order)], list(sizes_out))
        return [self._pack(name, f"{name}[{index}]", part) for index, part in enumerate(parts)]

    def take_packed_experts(self, name: str, shape: FusedExperts) -> list[list[PackedWeight]]:
        if name not in self._types or shape.transposed:
            return self._checkpoint.take_packed_experts(name, shape)
        packed = [
            [self._pack(name, f"{name}[{expert}][{index}]", part) for index, part in enumerate(shape.parts(raw))]
            for expert, raw in enumerate(self._take_raw(name, shape.shape))
        ]
        return [list(part) for part in zip(*packed)]

    def _take_raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the blocks of a matrix, or of the matrices of all experts: uint8 [..., out, bytes]."""
        type_name = self._types[name]
        if type_name not in BLOCK_TYPES:
            raise ConfigError(
                f"--quantization gguf: {name} has GGUF's type {type_name}; supported are {', '.join(BLOCK_TYPES)}; "
                "choose --quantization int8"
            )
        self._checkpoint.leave(name)
        try:
            if self._checkpoint.pack.needs_content:
                self._lookahead.take(name)
                raw: Tensor = self._blocks.get_tensor(name)
                will_read(raw)
            else:
                raw = torch.empty(self._blocks.get_slice(name).get_shape(), dtype=torch.uint8, device="meta")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._file} is damaged: {error}") from error
        block = BLOCK_TYPES[type_name]
        if raw.dtype != torch.uint8 or raw.shape != (*shape[:-1], shape[-1] // block.elements * block.bytes):
            raise ModelError(
                f"{self._file} does not fit config.json: {name} has {list(raw.shape)} bytes of {type_name}"
            )
        return raw

    def _pack(self, tensor: str, name: str, raw: Tensor) -> PackedWeight:
        """Pack the blocks of one matrix, which is called `name`, of a tensor."""
        return self._checkpoint.pack(name, BlockMatrix(self._types[tensor], raw, self._checkpoint.dtype))


def _types(blocks: Any) -> dict[str, str]:
    """Return the GGUF type of each quantized matrix, by the matrix's name."""
    return blocks.metadata() or {}
