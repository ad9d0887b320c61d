"""Keeps a GGUF file's own blocks beside what was converted from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from safetensors.torch import save_file
from torch import Tensor

from paceline.models.folder import BLOCKS_FILE
from paceline.models.gguf_blocks import BLOCK_TYPES, decode_blocks

_WHOLE_TYPES = ("F64", "F32", "F16", "BF16")


def write_blocks(reader: GGUFReader, architecture: str, model: Any, target: Path) -> None:
    """Writes the blocks of all quantized matrices to `target`, under the names that safetensors have.

    A tensor is uint8 [out, bytes]; the file's metadata name each one's type, also of those that we cannot compute with.
    Left out is what does not dequantize to the model's own matrix: it was changed on the way, and is used as it became.

    Args:
        reader: of the GGUF file.
        model: what transformers made of it, in bfloat16.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, model.config.num_hidden_layers)
    blocks: dict[str, Tensor] = {}
    types: dict[str, str] = {}
    for name, weight in model.state_dict().items():
        tensor = tensors.get(names.get_name(name, try_suffixes=(".weight",)) or "")
        if tensor is None or tensor.tensor_type.name in _WHOLE_TYPES:
            continue
        type_name = tensor.tensor_type.name
        if type_name in BLOCK_TYPES:
            raw = torch.from_numpy(tensor.data.copy())[_row_order(name, weight, architecture, model.config)]
            if not torch.equal(decode_blocks(type_name, raw, torch.bfloat16).dequantize(), weight):
                continue
            blocks[name] = raw
        types[name] = type_name
    save_file(blocks, target / BLOCKS_FILE, metadata=types)


def _row_order(name: str, weight: Tensor, architecture: str, config: Any) -> Tensor:
    """Which rows of the file are a matrix's: llama.cpp interleaves the two halves of Llama's rotary embedding."""
    rows = torch.arange(weight.shape[0])
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture != "llama" or heads is None:
        return rows
    return rows.view(heads, -1, 2).transpose(1, 2).flatten()
