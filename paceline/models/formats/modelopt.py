"""Matrices of NVIDIA's ModelOpt: floats of 8 bits with one scale, and NVFP4 with a second scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from paceline.models.formats import mx
from paceline.models.formats.base import (
    BYTES,
    FLOAT8,
    FLOATS,
    KV_SCALES,
    Codes,
    Json,
    StoredTensor,
    count_field,
    floats_of_8_bits,
    refuse,
)

if TYPE_CHECKING:
    from torch import Tensor

_GROUP = 16


class ModelOpt:
    """Matrices of `quant_method` modelopt."""

    name: ClassVar[str] = "ModelOpt"
    marks: ClassVar[Sequence[str]] = (".weight_scale",)
    unread: ClassVar[Sequence[str]] = (".input_scale", *KV_SCALES)

    def __init__(self, config: Json) -> None:
        algorithm = str(config.get("quant_algo") or "").upper()
        if not algorithm and (config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")):
            algorithm = "FP8"  # only keys and values are quantized, so no matrix has a mark
        if algorithm not in ("FP8", "NVFP4"):
            raise refuse(self.name, f"with the algorithm {algorithm or None}; supported are FP8 and NVFP4")
        self._is_fp4 = algorithm == "NVFP4"
        if self._is_fp4 and count_field(config, self.name, "group_size", _GROUP) != _GROUP:
            raise refuse(self.name, "as NVFP4 in groups that do not have 16 values")

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        if not self._is_fp4:
            return {
                "floats": StoredTensor(f"{matrix}.weight", shape, FLOAT8),
                "scale": StoredTensor(f"{matrix}.weight_scale", (1,), FLOATS),
            }
        size_out, size_in = shape
        return {
            "packed": StoredTensor(f"{matrix}.weight", (size_out, -(-size_in // 2)), BYTES),
            "scale": StoredTensor(f"{matrix}.weight_scale", (size_out, -(-size_in // _GROUP)), FLOAT8),
            "whole": StoredTensor(f"{matrix}.weight_scale_2", (1,), FLOATS),
        }

    def weights_in(self, tensor: str, dtype: str, shape: Sequence[int]) -> int:
        if tensor.endswith((*self.marks, *self.unread, ".weight_scale_2")):
            return 0
        return 2 if dtype == "U8" else 1

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor:
        import torch  # here, because processes without torch read configs

        if not self._is_fp4:
            block = (shape[0], -(-shape[1] // 32) * 32)
            return floats_of_8_bits(tensors["floats"], tensors["scale"].float().view(1, 1), block)
        return mx.decode_nvfp4(
            tensors["packed"], tensors["scale"], tensors["whole"], shape[1], divides=False, rounding=torch.float32
        )
