"""Safetensors files that may be hostile: their tensors as views of the file's content."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor

from paceline.core.adapters import TENSORS_FILE
from paceline.core.errors import ModelError
from paceline.models.adapters.json_object import parse_object

_MOST_HEADER_BYTES = 16 << 20
_MOST_DIMENSIONS = 4
_MOST_ELEMENTS = 1 << 40
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAME = re.compile(r"[!-~]{1,512}")
"""Names of tensors, which messages repeat."""


def tensors_of(content: bytearray) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors file with their names, in the order of their places.

    The library safetensors would copy all of them in one call, during which no other thread could run Python.

    Raises ModelError if the file is damaged: each of its bytes must belong to one tensor.
    """
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(_MOST_HEADER_BYTES, len(content) - 8):
        raise _damaged("its header is too long")
    header = parse_object(content[8 : 8 + length], f"the header of {TENSORS_FILE}, which must be a safetensors file,")
    header.pop("__metadata__", None)
    places = sorted((_place(key, entry), key) for key, entry in header.items())
    start = end = 8 + length
    for (begin, own_end), key in places:
        if start + begin != end:
            raise _damaged(f"{key} overlaps with another tensor, or bytes before it belong to none")
        end = start + own_end
    if end != len(content):
        raise _damaged("it has more or fewer bytes than its tensors")
    for (begin, _), key in places:
        yield key, _view(key, header[key], content, start + begin)


def _place(key: str, entry: Any) -> tuple[int, int]:
    """Return the place of a tensor after the header, as its first byte and the byte after its last one."""
    if not _NAME.fullmatch(key):
        raise _damaged(f"{key!r:.80} is no name of a tensor")
    shape, ends = (entry.get("shape"), entry.get("data_offsets")) if isinstance(entry, dict) else (None, None)
    if not (_are_numbers(shape, _MOST_DIMENSIONS) and _are_numbers(ends, 2) and len(ends) == 2):
        raise _damaged(f"{key} has no shape or no place")
    name = entry.get("dtype")
    if not isinstance(name, str) or name not in _DTYPES:
        raise ModelError(f"{TENSORS_FILE}: {key} has the dtype {name!r:.40}; it must be F32, F16 or BF16")
    if ends[1] - ends[0] != math.prod(shape) * _DTYPES[name].itemsize:
        raise _damaged(f"{key} has other bytes than its shape")
    if not math.prod(shape):
        raise ModelError(f"{TENSORS_FILE}: {key} has the shape {shape}, so it is empty")
    return ends[0], ends[1]


def _view(key: str, entry: dict[str, Any], content: bytearray, begin: int) -> Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    count = math.prod(shape)
    if begin % dtype.itemsize:
        content, begin = content[begin : begin + count * dtype.itemsize], 0
    return torch.frombuffer(content, dtype=dtype, count=count, offset=begin).view(shape)


def _are_numbers(value: Any, most: int) -> TypeGuard[list[int]]:
    """Return whether a value is a list of at most `most` sizes or places."""
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(type(number) is int and 0 <= number <= _MOST_ELEMENTS for number in value)
    )


def _damaged(why: str) -> ModelError:
    return ModelError(f"{TENSORS_FILE} is damaged or not a safetensors file: {why}")
