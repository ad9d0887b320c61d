"""The tensors of an adapter: adapter_model.safetensors as PEFT writes it, by the names of modules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from paceline.core.adapters import TENSORS_FILE
from paceline.core.errors import ModelError

_MOST_HEADER_BYTES = 16 << 20
_MOST_DIMENSIONS = 4
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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

    The library safetensors would copy all of them in one call, during which no other thread could run Python.

    Raises ModelError, with the key's name, if a tensor has another meaning, is incomplete, or is not finite.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _tensors(content):
        module, part = _read_key(key)
        _check_tensor(key, tensor, dimensions=1 if part == "Bbias" else 2)
        if modules.setdefault(module, {}).setdefault(part, tensor) is not tensor:
            raise ModelError(f"{TENSORS_FILE}: {key} is there twice, with and without the beginning base_model.model")
    if not modules:
        raise ModelError(f"{TENSORS_FILE} has no tensors")
    return dict(_complete(modules))


def _tensors(content: bytearray) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors file with their names. Raises ModelError if the file is damaged."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(_MOST_HEADER_BYTES, len(content) - 8):
        raise _damaged("its header is too long")
    try:
        header: Any = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise _damaged(str(error)) from None
    if not isinstance(header, dict):
        raise _damaged("its header is no object")
    header.pop("__metadata__", None)
    for key, entry in header.items():
        if not isinstance(entry, dict):
            raise _damaged(f"{key:.200} is no object")
        yield key, _view(key, entry, content, 8 + length)


def _view(key: str, entry: dict[str, Any], content: bytearray, start: int) -> Tensor:
    """Return a tensor of the file.

    Args:
        entry: what the header says about the tensor.
        start: place of the first tensor's bytes.
    """
    name, shape, ends = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (_are_numbers(shape) and _are_numbers(ends)):
        raise _damaged(f"{key:.200} has no shape or no place")
    if not isinstance(name, str) or name not in _DTYPES:
        raise ModelError(f"{TENSORS_FILE}: {key:.200} has the dtype {name!r:.40}; it must be F32, F16 or BF16")
    dtype, count = _DTYPES[name], math.prod(shape)
    if len(ends) != 2 or min(shape, default=1) < 0 or not 0 <= ends[0] <= ends[1] <= len(content) - start:
        raise _damaged(f"{key:.200} lies outside of the file")
    if ends[1] - ends[0] != count * dtype.itemsize:
        raise _damaged(f"{key:.200} has other bytes than its shape")
    if not count or len(shape) > _MOST_DIMENSIONS:
        raise ModelError(f"{TENSORS_FILE}: {key:.200} has the shape {shape!s:.80}")
    begin = start + ends[0]
    if begin % dtype.itemsize:
        content, begin = content[begin : start + ends[1]], 0
    return torch.frombuffer(content, dtype=dtype, count=count, offset=begin).view(shape)


def _are_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int for number in value)


def _damaged(why: str) -> ModelError:
    return ModelError(f"{TENSORS_FILE} is damaged or not a safetensors file: {why}")


def _read_key(key: str) -> tuple[str, str]:
    """Return the module of a tensor, and which of its tensors it is: "Aweight", "Bweight" or "Bbias"."""
    if reason := next((reason for part, reason in _REFUSED.items() if part in key), ""):
        raise ModelError(f"{TENSORS_FILE}: {key:.200}: {reason}")
    match = _KEY.fullmatch(key)
    if match is None or match[2] + match[3] == "Abias":
        raise ModelError(f"{TENSORS_FILE}: {key:.200} is no tensor of a LoRA adapter of linear layers")
    return match[1], match[2] + match[3]


def _check_tensor(key: str, tensor: Tensor, dimensions: int) -> None:
    if tensor.dim() != dimensions:
        raise ModelError(f"{TENSORS_FILE}: {key:.200} has the shape {list(tensor.shape)}")
    least, most = tensor.aminmax()  # `isfinite` would take half of the time to read an adapter
    if not (math.isfinite(least) and math.isfinite(most)):
        raise ModelError(f"{TENSORS_FILE}: {key:.200} has NaN or infinity")


def _complete(modules: dict[str, dict[str, Tensor]]) -> Iterator[tuple[str, ModuleTensors]]:
    for module, parts in modules.items():
        down, up = parts.get("Aweight"), parts.get("Bweight")
        if down is None or up is None:
            missing = "lora_A" if down is None else "lora_B"
            raise ModelError(f"{TENSORS_FILE}: the module {module:.200} has no {missing}")
        yield module, ModuleTensors(down, up, parts.get("Bbias"))
