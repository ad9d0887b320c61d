"""The log-mel features that Gemma 4's smaller models hear."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from paceline.services.gateway.planning.media.items import SAMPLING_RATE
from paceline.services.gateway.planning.media.processors.base import Samples

MELS = 128
_FRAME = 320
_HOP = 160
_FFT = 512
_HIGHEST_HZ = 8000.0
_FLOOR = 1e-3
_LEAD = _FRAME // 2
"""Zeros before the first sample, so that the first frame is centred on it."""


def frame_count(samples: int) -> int:
    """Return the number of frames of so many samples. A frame counts if one more sample follows it."""
    return max(0, (samples + _LEAD - _FRAME - 1) // _HOP + 1)


def log_mel(samples: Samples) -> NDArray[np.float32]:
    """Return features [frame_count(samples), MELS]: ln(mel + 0.001) of the magnitudes of windowed frames."""
    padded = np.pad(samples, (_LEAD, 0))
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::_HOP][: frame_count(len(samples))]
    magnitudes = np.abs(np.fft.rfft(frames * _window(), n=_FFT, axis=-1))
    return np.log(magnitudes @ _filters() + _FLOOR).astype(np.float32)


@functools.cache
def _window() -> NDArray[np.float32]:
    """Return the periodic Hann window."""
    return np.hanning(_FRAME + 1)[:-1].astype(np.float32)


@functools.cache
def _filters() -> NDArray[np.float64]:
    """Return triangular filters [frequencies, MELS], whose corners are evenly spaced on HTK's mel scale."""
    corners = _hertz(np.linspace(0.0, _mel(_HIGHEST_HZ), MELS + 2))
    frequencies = np.linspace(0.0, SAMPLING_RATE / 2, _FFT // 2 + 1)
    widths = np.diff(corners)
    distances = corners[None, :] - frequencies[:, None]
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    return np.maximum(0.0, np.minimum(rising, falling))


def _mel(hertz: float) -> float:
    return float(2595.0 * np.log10(1.0 + hertz / 700.0))


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    return 700.0 * (np.power(10.0, mels / 2595.0) - 1.0)
