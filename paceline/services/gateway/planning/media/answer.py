"""Checks the answer of a process that decodes. A hostile file may control the process, so nothing of it is trusted.

All functions raise ValueError, KeyError, TypeError or OverflowError if an answer contradicts itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

_FORMS: Mapping[str, tuple[type[np.generic], int, tuple[str, ...]]] = {
    "image": (np.uint8, 3, ()),
    "video": (np.uint8, 4, ("timestamps",)),
    "audio": (np.float32, 1, ()),
}
"""For each kind of item: the type of its array, the array's number of dimensions, and the names of the item's facts."""

Facts: TypeAlias = dict[str, NDArray[np.float64]]
"""A decoder's facts about an item besides its array, by name: for a video `timestamps` of its frames, in seconds."""


def facts_of(kind: str, answer: dict[str, Any], length: int) -> Facts:
    """Return the facts of an answer. Each fact has one number for every element of the array's first axis."""
    _, _, names = _FORMS[kind]
    facts = {name: np.array(values, np.float64) for name, values in dict(answer["facts"]).items()}
    fits = all(values.shape == (length,) and np.isfinite(values).all() for values in facts.values())
    if facts.keys() != set(names) or not fits:
        raise ValueError("the facts do not fit the array")
    return facts


def array_of(kind: str, answer: dict[str, Any], payload: memoryview) -> NDArray[Any]:
    """Return the decoded item of an answer: its payload in the shape that the answer names."""
    shape, dtype = tuple(answer["shape"]), np.dtype(answer["dtype"])
    wanted, dimensions, _ = _FORMS[kind]
    if dtype != wanted or len(shape) != dimensions or (dimensions > 1 and shape[-1] != 3) or min(shape) < 1:
        raise ValueError(f"it is no array of the kind {kind}")
    if math.prod(shape) * dtype.itemsize != len(payload):
        raise ValueError("the array has another size than its shape says")
    return np.frombuffer(payload, dtype).reshape(shape)


def size_of(answer: dict[str, Any]) -> tuple[int, int]:
    """Return the height and width of an image, which a decoder tells before it sends the pixels."""
    height, width = answer["size"]
    if not (type(height) is type(width) is int and height > 0 and width > 0):
        raise ValueError("the image has no size")
    return height, width
