"""The tensors of an adapter: adapter_model.safetensors as PEFT writes it, by the names of modules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from paceline.core.adapters import TENSORS_FILE
from paceline.core.errors import ModelError
from paceline.models.adapters.safetensors_file import tensors_of

_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\."
    r"((?P<down>lora_A\.weight)|(?P<up>lora_B\.weight)|(?P<bias>lora_B\.bias)"
    r"|(?P<magnitude>lora_magnitude_vector(\.weight)?)|(?P<own_bias>(base_layer\.)?bias)"
    r"|(?P<matrix>base_layer\.weight))"
)
_REFUSED = {
    "lora_embedding_": "adapters of embeddings are not supported; merge the adapter into the model",
    "modules_to_save": "whole modules are not supported; merge the adapter into the model",
    "base_layer.lora": "adapters of experts' parameters are not supported; merge the adapter into the model",
}
"""Reasons for which tensors are refused, by a part of their keys."""


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of one module."""

    down: Tensor | None = None
    """[rank, in]; None, as is `up`, if the module only has another bias of its own."""
    up: Tensor | None = None
    """[out, rank]"""
    bias: Tensor | None = None
    """[out]: the bias of `up`."""
    magnitude: Tensor | None = None
    """[out]: the lengths of the rows of the whole matrix (DoRA)."""
    own_bias: Tensor | None = None
    """[out]: what replaces the bias of the module itself."""
    matrix: Tensor | None = None
    """[out, in]: the module's own matrix, which PEFT writes with adapters of the head."""


def read_tensors(content: bytearray) -> dict[str, ModuleTensors]:
    """Return the tensors of an adapter by the names of their modules, as views of the file's content.

    Raises ModelError, with the key's name, if a tensor has another meaning, is incomplete, or is not finite.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors_of(content):
        module, part = _read_key(key)
        _check_tensor(key, tensor, dimensions=2 if part in ("down", "up", "matrix") else 1)
        if modules.setdefault(module, {}).setdefault(part, tensor) is not tensor:
            raise ModelError(f"{TENSORS_FILE}: {key} is there twice, with other spellings")
    if not modules:
        raise ModelError(f"{TENSORS_FILE} has no tensors")
    return dict(_complete(modules))


def _read_key(key: str) -> tuple[str, str]:
    """Return the module of a tensor, and which of its tensors it is, as a field of `ModuleTensors`."""
    if reason := next((reason for part, reason in _REFUSED.items() if part in key), ""):
        raise ModelError(f"{TENSORS_FILE}: {key}: {reason}")
    match = _KEY.fullmatch(key)
    if match is None:
        raise ModelError(f"{TENSORS_FILE}: {key} is no tensor of a LoRA adapter of linear layers")
    parts = "down", "up", "bias", "magnitude", "own_bias", "matrix"
    return match["module"], next(part for part in parts if match[part])


def _check_tensor(key: str, tensor: Tensor, dimensions: int) -> None:
    if tensor.dim() != dimensions:
        raise ModelError(f"{TENSORS_FILE}: {key} has the shape {list(tensor.shape)}")
    least, most = tensor.aminmax()  # `isfinite` would take half of the time to read an adapter
    if not (math.isfinite(least) and math.isfinite(most)):
        raise ModelError(f"{TENSORS_FILE}: {key} has NaN or infinity")


def _complete(modules: dict[str, dict[str, Tensor]]) -> Iterator[tuple[str, ModuleTensors]]:
    for module, parts in modules.items():
        if parts.keys() != {"own_bias"}:
            for part, name in (("down", "lora_A"), ("up", "lora_B")):
                if part not in parts:
                    raise ModelError(f"{TENSORS_FILE}: the module {module} has no {name}")
        yield module, ModuleTensors(**parts)
