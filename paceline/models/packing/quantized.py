"""Packing of each matrix of a checkpoint for kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from paceline.core.config import WeightForm
from paceline.core.errors import ModelError
from paceline.core.online_quantization import OnlineQuantization
from paceline.kernels.interface import Kernels
from paceline.kernels.packed_weight import Allocate, PackedWeight
from paceline.kernels.quantized import QuantizedMatrix, QuantizedRows
from paceline.kernels.rounding import round_matrix
from paceline.models.gguf.blocks import BlockMatrix

Matrix = Tensor | QuantizedMatrix | BlockMatrix
"""A matrix [out, in], or the matrices of all heads [heads, out, in]. On the meta device, the matrix is missing or will
not be read.
"""


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs the matrices of a model for kernels."""

    kernels: Kernels
    device: torch.device
    """Device on which dequantized matrices are packed."""
    weight_form: WeightForm = "none"
    needs_content: ClassVar[bool] = True
    """Whether this function reads the matrices, as in `Pack`."""

    @property
    def form(self) -> str:
        """The form of packed matrices, as part of a folder's name; empty if matrices stay as they are."""
        kernels = self.kernels
        return kernels.packing if self.weight_form == "none" else kernels.quantized_packing

    @property
    def suffix(self) -> str:
        """A part of the names of folders, so that each quantization of a model has its own."""
        return "" if self.weight_form == "none" else f"-{self.weight_form}"

    def __call__(self, name: str, weight: Matrix, allocate: Allocate | None = None) -> PackedWeight:
        """Pack the matrix of this name; see `Kernels.pack`. Matrices of heads are never quantized.

        Raises:
            ModelError: a matrix with NaN or infinity cannot be rounded.
        """
        if isinstance(weight, BlockMatrix):
            if self.weight_form == "gguf":
                return self.kernels.pack(QuantizedRows(weight.shape, weight.dtype, weight.decode), allocate)
            weight = weight.dequantize().to(self.device)
        if isinstance(weight, QuantizedMatrix):
            # With int8, too: such a matrix of a checkpoint fits in eight bits as it is. The reference keeps those
            # for which it rounds x.
            stays = self.weight_form != "none" and (self.kernels.quantized_packing or weight.input_scale is not None)
            if stays and not self.kernels.quantized_packing:
                values, scales = weight.values.to(self.device), weight.scales.to(self.device)
                weight = replace(weight, values=values, scales=scales)
            return self.kernels.pack(weight if stays else weight.dequantize().to(self.device), allocate)
        return self.kernels.pack(self._rounded(name, weight), allocate)

    def _rounded(self, name: str, weight: Tensor) -> Tensor | QuantizedMatrix:
        if not isinstance(self.weight_form, OnlineQuantization) or weight.dim() != 2 or weight.is_meta:
            return weight
        found = self.weight_form.format_of(name)
        try:
            return weight if found is None else round_matrix(weight, found)
        except ValueError as error:
            raise ModelError(f"{name} cannot be rounded to {found}: {error}; choose --quantization none") from error

    def without_data(self, weight: Matrix) -> PackedWeight:
        """Return the packed matrix that a call would return, but on the meta device and without a format."""
        return self.kernels.pack(torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
