"""Checks a GGUF file's tensors against the converted model, and writes the file's quantized blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.models.folder import BLOCKS_FILE
from paceline.models.gguf_blocks import BLOCK_TYPES, WHOLE_TYPES, BlockMatrix
from paceline.models.gguf_reader import DamagedError


def write_blocks(reader: GGUFReader, architecture: str, model: Any, target: Path) -> None:
    """Write the blocks of all quantized matrices to BLOCKS_FILE in `target`, under their names in safetensors.

    A tensor is uint8 [out, bytes]. The file's metadata name the type of each quantized matrix. Matrices of a type that
    we cannot compute with are named, but have no tensor. A matrix whose blocks do not dequantize to the model's own
    matrix is left out: the conversion has changed it, so the converted one must be used.

    Args:
        reader: the reader of the GGUF file.
        model: the model that transformers has made of it, in bfloat16.

    Raises:
        DamagedError: a tensor has numbers that are NaN or infinite.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    blocks: dict[str, Tensor] = {}
    types: dict[str, str] = {}
    for name, own_name, weight, expert in _matrices(model, architecture):
        check_numbers(own_name, weight)
        tensor = tensors.get(own_name)
        if tensor is None or tensor.tensor_type.name in WHOLE_TYPES:
            continue
        type_name = tensor.tensor_type.name
        if type_name in BLOCK_TYPES:
            data = tensor.data if expert is None else tensor.data[expert]
            raw = torch.from_numpy(data.copy())[_row_order(name, weight, architecture, model.config)]
            if not torch.equal(BlockMatrix(type_name, raw, torch.bfloat16).decode().dequantize(), weight):
                continue
            blocks[name] = raw
        types[name] = type_name
    # With empty metadata, safetensors writes a header that it cannot read.
    save_file(blocks, target / BLOCKS_FILE, metadata=types or None)


def check_tensors(present: Mapping[str, Sequence[int]], architecture: str, model: Any) -> None:
    """Check that a GGUF file has the tensors of a model, in their shapes, and no others.

    transformers fills tensors that the file lacks with random numbers, and ignores tensors that it does not know.

    Args:
        present: shapes of the file's tensors, by their names in the file.
        model: the model that transformers makes of the file's metadata, without data.

    Raises:
        ModelError: a tensor is missing, would be lost, or has another shape.
    """
    # Experts share a tensor of the file, so the entry of the last expert stays, and tells their number.
    known = {own_name: (weight, expert) for _, own_name, weight, expert in _matrices(model, architecture) if own_name}
    tied = {"output.weight"} if model.config.tie_word_embeddings else set()
    if missing := sorted(known.keys() - present.keys() - tied):
        raise ModelError(f"it has no tensor {missing[0]}{_and_others(missing)}")
    if lost := sorted(present.keys() - known.keys()):
        raise ModelError(f"its tensor {lost[0]}{_and_others(lost)} would be lost")
    for name, shape in present.items():
        weight, expert = known[name]
        wanted = [*([] if expert is None else [expert + 1]), *weight.shape]
        if shape != wanted:
            raise ModelError(f"its tensor {name} has the shape {shape}, but its metadata say {wanted}")


def check_numbers(name: str, numbers: Tensor) -> None:
    """Raise DamagedError if numbers of the file's tensor `name` are NaN or infinite in bfloat16."""
    # Minimum and maximum take one pass without a temporary tensor, and both are NaN if any number is.
    if not torch.stack(torch.aminmax(numbers)).isfinite().all():
        raise DamagedError(f"its tensor {name} has numbers that are NaN or infinite")


def _and_others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _matrices(model: Any, architecture: str) -> Iterator[tuple[str, str, Tensor, int | None]]:
    """Yield each weight: its name in safetensors, its name in the file ("" if unknown), itself, its expert's number.

    transformers keeps the matrices of all experts in two tensors. safetensors have a matrix for each expert, and the
    file a tensor of all experts for each of gate, up and down.
    """
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, model.config.num_hidden_layers)

    def named(name: str) -> str:
        return names.get_name(name, try_suffixes=(".weight", ".bias")) or ""

    for name, weight in model.state_dict().items():
        place, _, last = name.rpartition(".mlp.experts.")
        if not place:
            yield name, named(name), weight, None
            continue
        kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
        for expert, matrix in enumerate(weight):
            for kind, part in zip(kinds, matrix.chunk(len(kinds))):
                own_name = named(f"{place}.mlp.experts.{kind}.weight")
                yield f"{place}.mlp.experts.{expert}.{kind}.weight", own_name, part, expert


def _row_order(name: str, weight: Tensor, architecture: str, config: Any) -> Tensor:
    """Return the file's row for each row of a matrix. llama.cpp interleaves the halves of Llama's rotary embedding."""
    rows = torch.arange(weight.shape[0])
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture != "llama" or heads is None:
        return rows
    return rows.view(heads, -1, 2).transpose(1, 2).flatten()
