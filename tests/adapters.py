"""Adapters as PEFT writes them, and the `transformers` models into which they are merged."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linears(model: transformers.PreTrainedModel, modules: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers of a model whose names end with one of these names."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in modules}


def write_adapter(
    folder: Path,
    model: transformers.PreTrainedModel,
    modules: Sequence[str] = ALL,
    rank: int = 4,
    seed: int = 0,
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
    layers: str = "",
    **settings: Any,
) -> Path:
    """Write a random adapter of a model's layers to a folder, as PEFT does, and return the folder.

    Args:
        size: how much the adapter changes the model.
        layers: regular expression that the names of adapted layers match; empty for all.
        settings: other keys of adapter_config.json.
    """
    generator, tensors = torch.Generator().manual_seed(seed), {}
    ranks: Mapping[str, int] = settings.get("rank_pattern", {})
    for name, layer in linears(model, modules).items():
        if not re.search(layers, name):
            continue
        own = next((value for key, value in ranks.items() if re.match(rf"(.*\.)?({key})$", name)), rank)
        begin = f"base_model.model.{name}"
        out, size_in = layer.weight.shape
        down = torch.randn(own, size_in, generator=generator) * size_in**-0.5
        up = torch.randn(out, own, generator=generator) * (size * own**-0.5)
        tensors |= {f"{begin}.lora_A.weight": down.to(dtype), f"{begin}.lora_B.weight": up.to(dtype)}
        if settings.get("lora_bias"):
            tensors[f"{begin}.lora_B.bias"] = torch.randn(out, generator=generator).to(dtype) * size
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none"}
    write_files(folder, {**config, **settings}, tensors)
    return folder


def write_files(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def merged(
    model: transformers.PreTrainedModel, folder: Path, scale: float | Mapping[str, float] = 2.0
) -> transformers.PreTrainedModel:
    """Return a model with an adapter merged into its weights.

    Args:
        scale: the factor of the adapter's products; by the end of the module's name, if there are several.
    """
    from safetensors.torch import load_file

    result, tensors = copy.deepcopy(model), load_file(folder / "adapter_model.safetensors")
    for name, layer in result.named_modules():
        begin = f"base_model.model.{name}"
        if f"{begin}.lora_A.weight" not in tensors:
            continue
        own = scale if isinstance(scale, float) else scale[name.rpartition(".")[2]]
        down, up = (tensors[f"{begin}.lora_{part}.weight"].float() for part in "AB")
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            layer.weight += own * (up @ down)
            if (bias := tensors.get(f"{begin}.lora_B.bias")) is not None:
                before = torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias
                layer.bias = nn.Parameter(before + own * bias.float())
    return result
