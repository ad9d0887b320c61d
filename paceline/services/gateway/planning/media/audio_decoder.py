"""Decodes audio."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray

from paceline.services.gateway.planning.media.container import BrokenItemError, open_container

_SAMPLE_RATES = range(1_000, 400_000)
_BYTES_PER_SAMPLE = 4
_FULL_SCALE = 1 << 15
"""Largest magnitude of a sample. Larger ones overflow in the features that models compute. A clip of floats in the
range of 16-bit integers still passes."""
_FILTER_TAPS = "64"
"""Length of the resampler's low-pass filter. With twice FFmpeg's default, less than 0.1 % of what is above the new
Nyquist frequency remains."""


def decode(
    data: memoryview, max_bytes: int, max_seconds: float, sample_rate: int, because: str = "--max-audio-seconds"
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Return {} (audio has no facts), and the mean of all channels: [samples], full scale from -1 to 1.

    Args:
        max_bytes: largest size of the returned array.
        max_seconds: length of the longest clip, in seconds.
        sample_rate: samples per second of the result.
        because: the reason for `max_seconds`, for errors.

    Raises BrokenItemError, or any error of PyAV.
    """
    pieces: list[NDArray[np.float32]] = []
    samples = 0
    with open_container(data, "an audio clip") as container:
        if not container.streams.audio:
            raise BrokenItemError("the file has no audio")
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1
        if stream.rate not in _SAMPLE_RATES:
            raise BrokenItemError(f"its sample rate is {stream.rate}, which is not from 1,000 to 400,000 per second")
        # Channels are interleaved, because PyAV reads separate ones wrongly if there are eight or more.
        resampler = AudioResampler("flt", rate=sample_rate, options={"filter_size": _FILTER_TAPS})
        # None takes the samples that the filter still holds.
        for frame in itertools.chain(container.decode(stream), [None]):
            for resampled in resampler.resample(frame):
                by_sample = resampled.to_ndarray().reshape(-1, resampled.layout.nb_channels)
                pieces.append(by_sample.mean(axis=1, dtype=np.float32))
                samples += pieces[-1].size
            if samples > max_seconds * sample_rate:
                raise BrokenItemError(f"the clip has more than {max_seconds:g} seconds ({because}); send a part of it")
            if samples * _BYTES_PER_SAMPLE > max_bytes:
                raise BrokenItemError("to decode it takes too much memory (--media-memory); send a shorter clip")
    if not samples:
        raise BrokenItemError("the clip has no samples")
    clip = np.concatenate(pieces)
    if not np.isfinite(clip).all():
        raise BrokenItemError("some of its samples are not finite numbers")
    if np.abs(clip).max() > _FULL_SCALE:
        raise BrokenItemError("its samples are far too large; samples of floating point must be from -1 to 1")
    return {}, clip
