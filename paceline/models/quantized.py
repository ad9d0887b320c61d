"""`Weights` with quantized matrices: rounded to int8, or kept as the blocks of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.config import Quantization
from paceline.core.errors import ConfigError, ModelError
from paceline.kernels.interface import Kernels, PackedWeight
from paceline.kernels.quantized import QuantizedMatrix, quantize_int8
from paceline.models.base import FusedExperts, Weights
from paceline.models.folder import BLOCKS_FILE
from paceline.models.gguf_blocks import BLOCK_TYPES, decode_blocks

if TYPE_CHECKING:
    from paceline.models.loader import Checkpoint


def quantized(checkpoint: Checkpoint, folder: Path, quantization: Quantization, kernels: Kernels) -> Weights:
    """Return the checkpoint's weights, quantized as `quantization` says.

    Raises:
        ConfigError: the quantization is unknown, or not possible for this folder.
        ModelError: the folder's blocks cannot be read.
    """
    if quantization == "none":
        return checkpoint
    if quantization == "int8":
        return Int8Weights(checkpoint, kernels)
    if quantization == "gguf":
        return GgufWeights(checkpoint, folder / BLOCKS_FILE, kernels)
    raise ConfigError(f"--quantization must be none, int8 or gguf, not {quantization!r}")


class Int8Weights:
    """Weights of any checkpoint, whose matrices are rounded to signed bytes when they are read."""

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels) -> None:
        self._checkpoint = checkpoint
        self._kernels = kernels
        self.take, self.take_table = checkpoint.take, checkpoint.take_table
        self.has = checkpoint.has

    def take_packed(self, name: str, *shape: int, order: Sequence[int] | None = None) -> PackedWeight:
        weight = self._checkpoint.take(name, *shape)
        return self._pack(weight if order is None else weight[list(order)])

    def take_packed_parts(
        self, name: str, sizes_out: Sequence[int], size_in: int, order: Sequence[int] | None = None
    ) -> list[PackedWeight]:
        weight = self._checkpoint.take(name, sum(sizes_out), size_in)
        weight = weight if order is None else weight[list(order)]
        return [self._pack(part) for part in torch.split(weight, list(sizes_out))]

    def take_packed_derived(
        self, name: str, shape: tuple[int, ...], derive: Sequence[Callable[[Tensor], Tensor]]
    ) -> list[PackedWeight]:
        weight = self._checkpoint.take(name, *shape)
        parts = [each(weight) for each in derive]
        return [self._pack(part) if part.dim() == 2 else self._kernels.pack(part) for part in parts]

    def take_packed_experts(self, name: str, shape: FusedExperts) -> list[list[PackedWeight]]:
        packed = [[self._pack(part) for part in parts] for parts in self._checkpoint.expert_parts(name, shape)]
        return [list(part) for part in zip(*packed)]

    def _pack(self, weight: Tensor | QuantizedMatrix) -> PackedWeight:
        """Round a matrix and pack it. A quantized one fits in eight bits as it is."""
        if isinstance(weight, QuantizedMatrix) or weight.is_meta:
            return self._kernels.pack(weight)
        return self._kernels.pack(quantize_int8(weight))


class GgufWeights:
    """Weights of a converted GGUF file, as its own blocks. They dequantize to the checkpoint's matrices bit for bit."""

    def __init__(self, checkpoint: Checkpoint, file: Path, kernels: Kernels) -> None:
        if not file.is_file():
            raise ConfigError(
                f"--quantization gguf: {file.parent} was not converted from a GGUF file, or an older version converted "
                "it; give serve or prepare the .gguf file or a bundled model's name, or choose --quantization int8"
            )
        self._checkpoint = checkpoint
        self._file = file
        self._kernels = kernels
        self.take, self.take_table = checkpoint.take, checkpoint.take_table
        self.has = checkpoint.has
        # No architecture that we convert has such matrices.
        self.take_packed_parts = checkpoint.take_packed_parts
        self.take_packed_derived = checkpoint.take_packed_derived
        self.take_packed_experts = checkpoint.take_packed_experts
        try:
            self._blocks: Any = safe_open(file, framework="pt", device="cpu")
            self._types = _types(self._blocks)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged: {error}") from error

    def take_packed(self, name: str, *shape: int, order: Sequence[int] | None = None) -> PackedWeight:
        type_name = self._types.get(name)
        if type_name is None:
            return self._checkpoint.take_packed(name, *shape, order=order)
        if type_name not in BLOCK_TYPES:
            raise ConfigError(
                f"--quantization gguf: {name} has GGUF's type {type_name}; supported are {', '.join(BLOCK_TYPES)}; "
                "choose --quantization int8"
            )
        self._checkpoint.leave(name)
        try:
            raw: Tensor = self._blocks.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._file} is damaged: {error}") from error
        block, (size_out, size_in) = BLOCK_TYPES[type_name], shape
        if raw.dtype != torch.uint8 or raw.shape != (size_out, size_in // block.elements * block.bytes):
            raise ModelError(
                f"{self._file} does not fit config.json: {name} has {list(raw.shape)} bytes of {type_name}"
            )
        raw = raw if order is None else raw[list(order)]
        return self._kernels.pack(decode_blocks(type_name, raw, self._checkpoint.dtype))


def _types(blocks: Any) -> dict[str, str]:
    """Return the GGUF type of each quantized matrix, by the matrix's name."""
    return blocks.metadata() or {}
