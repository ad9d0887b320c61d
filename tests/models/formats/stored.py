"""Quantized checkpoints of tiny models, and the models of `transformers` with the dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.models.formats import ANY, Codes, find_format

Stored = Callable[[str, Tensor], tuple[Mapping[str, Tensor], Tensor]]
"""Quantizes a matrix of a given name. Returns its tensors by the end of their names, and its dequantized weights."""


def store(folder: Path, reference: Any, config: Mapping[str, Any], stored: Stored, skipped: str = "lm_head") -> None:
    """Quantize the linear layers of a saved model, and give `reference` the dequantized weights.

    Args:
        config: the `quantization_config`.
        skipped: a part of the names of layers that are not quantized.
    """
    file = folder / "model.safetensors"
    tensors, state = load_file(file), reference.state_dict()
    for name in list(tensors):
        matrix = name.removesuffix(".weight")
        if name.endswith("_proj.weight") and skipped not in name:
            weight = tensors.pop(name)
            parts, whole = stored(matrix, weight)
            tensors |= {f"{matrix}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            state[name].copy_(whole)
    save_file(tensors, file)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))


def decoded(config: Mapping[str, Any], tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """Return the weights of the matrix "m", fp32, as our format decodes its tensors."""
    found = find_format({"quantization_config": config})
    assert found is not None
    wanted = found.tensors("m", shape)
    parts = {part: tensors[each.name.removeprefix("m.")] for part, each in wanted.items() if _is_there(each, tensors)}
    for part, tensor in parts.items():
        assert wanted[part].shape in (tuple(tensor.shape), (ANY,)), part
    codes = found.decode("m", parts, shape)
    return whole(codes) if isinstance(codes, Codes) else codes.float()


def whole(codes: Codes) -> Tensor:
    """Return the weights of codes, as their definition says it, fp32."""
    size_in = codes.values.shape[1]

    def of_values(numbers: Tensor) -> Tensor:
        return numbers.double().repeat_interleave(codes.group, 1)[:, :size_in]

    scales = codes.scales.double()
    if codes.scales.dtype == torch.uint8:
        scales = torch.exp2(scales - 127)
    elif codes.factors is not None:
        scales = (codes.scales.float() * codes.factors[0] / codes.factors[1]).double()
    values = codes.values.double() if codes.table is None else codes.table.double()[codes.values.int()]
    exact = values * of_values(scales)
    exact = exact if codes.offsets is None else exact + of_values(codes.offsets)
    return exact.float().to(codes.rounding or codes.scales.dtype).float()


def _is_there(tensor: Any, tensors: Mapping[str, Tensor]) -> bool:
    return tensor.name.removeprefix("m.") in tensors or not tensor.is_optional
