"""Floats of 8 bits as DeepSeek, Qwen and MiniMax publish them: E4M3 with a scale for each block of 128 x 128."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from paceline.models.formats.base import FLOAT8, FLOATS, KV_SCALES, Codes, Json, StoredTensor, floats_of_8_bits, refuse

if TYPE_CHECKING:
    from torch import Tensor


class Float8:
    """Matrices of `quant_method` fp8. `weight_scale_inv` is, despite its name, the factor of the weights."""

    name: ClassVar[str] = "FP8"
    marks: ClassVar[Sequence[str]] = (".weight_scale_inv", ".weight_scale")
    unread: ClassVar[Sequence[str]] = (".input_scale", ".activation_scale", *KV_SCALES)

    def __init__(self, config: Json) -> None:
        kind = str(config.get("fmt") or "e4m3").lower()
        if kind not in ("e4m3", "float8_e4m3fn"):
            raise refuse(self.name, f"of the kind {kind}; only e4m3 is supported")
        block = config.get("weight_block_size")
        is_block = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        if block is not None and not is_block:
            raise refuse(self.name, f"but weight_block_size is {block!r:.40}, not two sizes")
        self._block: list[int] | None = block

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        parts = {"floats": StoredTensor(f"{matrix}.weight", shape, FLOAT8)}
        if self._block is None:
            for ending in ("weight_scale", "weight_scale_inv"):
                parts[ending] = StoredTensor(f"{matrix}.{ending}", (1,), FLOATS, is_optional=True)
        else:
            blocks = tuple(-(-size // count) for size, count in zip(shape, self._block))
            parts["weight_scale_inv"] = StoredTensor(f"{matrix}.weight_scale_inv", blocks, FLOATS)
        return parts

    def weights_in(self, tensor: str, dtype: str, shape: Sequence[int]) -> int:
        return 0 if tensor.endswith((*self.marks, *self.unread)) else 1

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor:
        found = [tensors[ending] for ending in ("weight_scale_inv", "weight_scale") if ending in tensors]
        if len(found) != 1:
            raise refuse(self.name, f"but {matrix} has not one tensor of scales")
        scales = found[0].float()
        block = (shape[0], -(-shape[1] // 32) * 32) if self._block is None else self._block
        return floats_of_8_bits(tensors["floats"], scales.view(1, 1) if self._block is None else scales, block)
