"""Pictures to preprocess, and the arrays that come out."""

from __future__ import annotations

import numpy as np

from paceline.core.media import MediaInput


def picture(height: int, width: int) -> np.ndarray:
    """Return noise over a slope, so that a resize has something to blur and something to keep."""
    noise = np.random.default_rng(height * width).integers(0, 80, (height, width, 3))
    return (noise + np.linspace(0, 175, width, dtype=np.int64)[None, :, None]).astype(np.uint8)


def values(own: MediaInput) -> np.ndarray:
    return np.frombuffer(own.data, own.dtype).reshape(own.shape)
