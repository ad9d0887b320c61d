"""What a process that decodes has answered. A hostile file may have taken it over, so nothing of it is believed.

All functions raise ValueError, KeyError, TypeError or OverflowError if an answer contradicts itself.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Facts: TypeAlias = dict[str, NDArray[np.float64]]
"""What a decoder tells about an item besides its array: for a video, the `timestamps` of its frames in seconds."""


def facts_of(answer: dict[str, Any], length: int) -> Facts:
    """Return the facts of an answer, each of which has a number for every element of the array."""
    facts = {name: np.array(values, np.float64) for name, values in dict(answer["facts"]).items()}
    if any(values.shape != (length,) or not np.isfinite(values).all() for values in facts.values()):
        raise ValueError("the facts do not fit the array")
    return facts


def array_of(answer: dict[str, Any], payload: memoryview) -> NDArray[Any]:
    """Return the array of an answer."""
    shape, dtype = tuple(answer["shape"]), np.dtype(answer["dtype"])
    if dtype not in (np.uint8, np.float32) or math.prod(shape) * dtype.itemsize != len(payload):
        raise ValueError("the array has another size than its shape says")
    return np.frombuffer(payload, dtype).reshape(shape)


def size_of(answer: dict[str, Any]) -> tuple[int, int]:
    """Return the height and width of an image whose pixels follow later."""
    height, width = answer["size"]
    if not (type(height) is type(width) is int and height > 0 and width > 0):
        raise ValueError("the image has no size")
    return height, width
