"""Matrices of bitsandbytes: 4 bits (NF4, FP4) with a scale for each block, and 8 bits with a scale for each row.

Source: QLoRA (Dettmers et al. 2023, arXiv 2305.14314), LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from paceline.models.formats.base import ANY, BYTES, Codes, Json, StoredTensor, count_field, refuse

if TYPE_CHECKING:
    from torch import Tensor

_STORAGE = {"uint8": ("U8", 1), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "float32": ("F32", 4)}
"""The dtype in a file, and its bytes, of each `bnb_4bit_quant_storage`."""
_SCALE_OF_ROW = 7.874015718698502e-3
"""1 / 127 as the library writes it: a row's largest magnitude is 127."""


class BitsAndBytes:
    """Matrices of `quant_method` bitsandbytes."""

    name: ClassVar[str] = "bitsandbytes"
    marks: ClassVar[Sequence[str]] = (".weight.absmax", ".SCB")
    unread: ClassVar[Sequence[str]] = ()

    def __init__(self, config: Json) -> None:
        self._is_4_bits = config.get("load_in_4bit") is True or config.get("_load_in_4bit") is True
        if not self._is_4_bits and config.get("load_in_8bit") is not True and config.get("_load_in_8bit") is not True:
            raise refuse(self.name, "with neither 4 nor 8 bits; set load_in_4bit or load_in_8bit")
        self._kind = str(config.get("bnb_4bit_quant_type", "fp4")).lower()
        if self._is_4_bits and self._kind not in ("nf4", "fp4"):
            raise refuse(self.name, f"of the kind {self._kind:.40}; supported are nf4 and fp4")
        storage = str(config.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
        if self._is_4_bits and storage not in _STORAGE:
            raise refuse(self.name, f"stored as {storage:.40}; supported are {', '.join(_STORAGE)}")
        self._storage = _STORAGE.get(storage, _STORAGE["uint8"])

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        size_out, size_in = shape
        weight = f"{matrix}.weight"
        if not self._is_4_bits:
            return {
                "codes": StoredTensor(weight, shape, ("I8",)),
                "largest": StoredTensor(f"{matrix}.SCB", (size_out,), ("F32",)),
                "layout": StoredTensor(f"{matrix}.weight_format", (1,), BYTES, is_optional=True),
            }
        dtype, item = self._storage
        stored = -(-size_out * size_in // (2 * item))
        parts = {
            "codes": StoredTensor(weight, (stored, 1), (dtype,)),
            "scales": StoredTensor(f"{weight}.absmax", (ANY,), ("F32", "U8")),
            "map": StoredTensor(f"{weight}.quant_map", (16,), ("F32",)),
            "state": StoredTensor(f"{weight}.quant_state.bitsandbytes__{self._kind}", (ANY,), BYTES),
        }
        nested = {"nested_scales": ("nested_absmax", ANY), "nested_map": ("nested_quant_map", 256)}
        for part, (ending, size) in nested.items():
            parts[part] = StoredTensor(f"{weight}.{ending}", (size,), ("F32",), is_optional=True)
        return parts

    def weights_in(self, tensor: str, dtype: str, shape: Sequence[int]) -> int:
        if not tensor.endswith(".weight"):
            return 0
        if self._is_4_bits:
            # Codes are one column. Matrices that are not quantized may have the dtype in which codes are stored.
            return 2 * self._storage[1] if dtype == self._storage[0] and list(shape[1:]) == [1] else 1
        return 1

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor:
        return self._decode_4_bits(matrix, tensors, shape) if self._is_4_bits else self._decode_8_bits(tensors, shape)

    def _decode_8_bits(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        if "layout" in tensors and int(tensors["layout"].flatten()[0]):
            raise refuse(self.name, "with 8 bits in a layout for one kind of GPU; save it again with a newer release")
        scales = tensors["largest"][:, None] * _SCALE_OF_ROW
        return Codes(tensors["codes"], scales, None, 8, -(-shape[1] // 32) * 32)

    def _decode_4_bits(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor:
        import torch  # here, because processes without torch read configs

        state = self._state(matrix, tensors["state"])
        if state.get("shape") != list(shape):
            raise refuse(self.name, f"but {matrix} has the shape {state.get('shape')!r:.40} instead of {list(shape)}")
        block = count_field(state, self.name, "blocksize", 64)
        scales = self._scales(matrix, tensors, state)
        size = shape[0] * shape[1]
        if block <= 0 or len(scales) != -(-size // block):
            raise refuse(self.name, f"but {matrix} has {len(scales)} scales for blocks of {block} weights")
        codes = tensors["codes"].contiguous().view(torch.uint8).flatten()
        pairs = torch.stack((codes >> 4, codes & 15), 1).flatten()[:size]
        dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(str(state.get("dtype")), torch.float32)
        if block % 32 == 0 and shape[1] % block == 0:
            # Each row has whole blocks.
            values, by_row = pairs.char().view(shape), scales.view(shape[0], -1)
            return Codes(values, by_row, None, 4, block, tensors["map"], rounding=dtype)
        weights = tensors["map"][pairs.int()] * scales.repeat_interleave(min(block, size))[:size]
        return weights.to(dtype).view(shape)

    def _scales(self, matrix: str, tensors: Mapping[str, Tensor], state: Json) -> Tensor:
        """Return the scale of each block, fp32, which may itself be stored as a code of 8 bits."""
        scales = tensors["scales"]
        if not scales.dtype.is_floating_point:
            if "nested_scales" not in tensors or "nested_map" not in tensors:
                raise refuse(self.name, f"but {matrix} lacks the scales of its scales")
            block, offset = count_field(state, self.name, "nested_blocksize", 256), state.get("nested_offset", 0.0)
            nested = tensors["nested_scales"]
            if block <= 0 or len(nested) != -(-len(scales) // block) or not isinstance(offset, (int, float)):
                raise refuse(self.name, f"but the scales of {matrix} contradict each other")
            spread = nested.repeat_interleave(min(block, len(scales)))[: len(scales)]
            scales = tensors["nested_map"][scales.int()] * spread + offset
        return scales

    def _state(self, matrix: str, stored: Tensor) -> Json:
        """Return what the library notes of a matrix as JSON."""
        try:
            state = json.loads(bytes(stored.tolist()))
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, Mapping):
            raise refuse(self.name, f"but the quant_state of {matrix} is not an object in JSON")
        return state
