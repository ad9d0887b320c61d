"""The tensors of an adapter: adapter_model.safetensors as PEFT writes it, by the names of modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from paceline.core.adapters import TENSORS_FILE
from paceline.core.errors import ModelError
from paceline.models.adapters.safetensors_file import tensors_of

_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.(weight|bias)")
_REFUSED = {
    "lora_magnitude_vector": "DoRA is not supported; merge the adapter into the model",
    "lora_embedding_": "adapters of embeddings are not supported; merge the adapter into the model",
    "modules_to_save": "whole modules are not supported; merge the adapter into the model",
    "base_layer": "adapters of experts' parameters are not supported; merge the adapter into the model",
}
"""Reasons for which tensors are refused, by a part of their keys."""


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of one module."""

    down: Tensor
    """[rank, in]"""
    up: Tensor
    """[out, rank]"""
    bias: Tensor | None
    """[out]"""


def read_tensors(content: bytearray) -> dict[str, ModuleTensors]:
    """Return the tensors of an adapter by the names of their modules, as views of the file's content.

    Raises ModelError, with the key's name, if a tensor has another meaning, is incomplete, or is not finite.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors_of(content):
        module, part = _read_key(key)
        _check_tensor(key, tensor, dimensions=1 if part == "Bbias" else 2)
        if modules.setdefault(module, {}).setdefault(part, tensor) is not tensor:
            raise ModelError(f"{TENSORS_FILE}: {key} is there twice, with and without the beginning base_model.model")
    if not modules:
        raise ModelError(f"{TENSORS_FILE} has no tensors")
    return dict(_complete(modules))


def _read_key(key: str) -> tuple[str, str]:
    """Return the module of a tensor, and which of its tensors it is: "Aweight", "Bweight" or "Bbias"."""
    if reason := next((reason for part, reason in _REFUSED.items() if part in key), ""):
        raise ModelError(f"{TENSORS_FILE}: {key}: {reason}")
    match = _KEY.fullmatch(key)
    if match is None or match[2] + match[3] == "Abias":
        raise ModelError(f"{TENSORS_FILE}: {key} is no tensor of a LoRA adapter of linear layers")
    return match[1], match[2] + match[3]


def _check_tensor(key: str, tensor: Tensor, dimensions: int) -> None:
    if tensor.dim() != dimensions:
        raise ModelError(f"{TENSORS_FILE}: {key} has the shape {list(tensor.shape)}")
    if not tensor.isfinite().all():
        raise ModelError(f"{TENSORS_FILE}: {key} has NaN or infinity")


def _complete(modules: dict[str, dict[str, Tensor]]) -> Iterator[tuple[str, ModuleTensors]]:
    for module, parts in modules.items():
        down, up = parts.get("Aweight"), parts.get("Bweight")
        if down is None or up is None:
            missing = "lora_A" if down is None else "lora_B"
            raise ModelError(f"{TENSORS_FILE}: the module {module} has no {missing}")
        yield module, ModuleTensors(down, up, parts.get("Bbias"))
