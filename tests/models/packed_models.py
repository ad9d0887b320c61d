"""Kernels that count what they pack, and what packed models compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.kernels.native import NativeKernels
from paceline.kernels.packed_weight import Allocate, PackedWeight
from paceline.kernels.quantized import QuantizedMatrix
from paceline.models.base import Model

CPU = torch.device("cpu")
TOKENS = 9


class Counting(NativeKernels):
    """Kernels that count the matrices that they had to pack."""

    def __init__(self, instruction_set: str = "auto") -> None:
        super().__init__(1, instruction_set)
        self._packed: list[tuple[int, ...]] = []  # several threads pack, and appending is atomic

    @property
    def packed(self) -> int:
        return len(self._packed)

    def pack(self, weight: torch.Tensor | QuantizedMatrix, allocate: Allocate | None = None) -> PackedWeight:
        if isinstance(weight, QuantizedMatrix) or not weight.is_meta:
            self._packed.append(weight.shape)
        return super().pack(weight, allocate)


def logits(model: Model, paged_contexts: Any, dtype: torch.dtype) -> torch.Tensor:
    logits: torch.Tensor = paged_contexts(model, 1, TOKENS, dtype).step({0: [*range(3, 3 + TOKENS)]})[0]
    return logits


def packed_folders(packed_dir: Path) -> list[Path]:
    return sorted(packed_dir.glob("*.shards"))
