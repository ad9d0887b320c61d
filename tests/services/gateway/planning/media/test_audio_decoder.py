"""Clips become one channel at the wanted rate, as accurately as models need."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.http.errors import MediaError
from tests.services.gateway.planning.media.conftest import Decode
from tests.services.gateway.planning.media.samples import MUTATIONS, Mutation, audio_file, image_file, tone, video_file

OPTIONS: dict[str, Any] = {"max_seconds": 10.0, "sample_rate": 16_000}
FORMATS = [
    ("wav", "pcm_s16le"),
    ("wav", "pcm_f32le"),
    ("flac", "flac"),
    ("mp3", "libmp3lame"),
    ("ogg", "libopus"),
    ("mp4", "aac"),
    ("webm", "libopus"),
]


@pytest.mark.parametrize(("format", "codec"), FORMATS)
def test_reads_format(decode: Decode, format: str, codec: str) -> None:
    _, clip = decode("audio", audio_file(rate=48_000, format=format, codec=codec), **OPTIONS)
    assert clip.dtype == np.float32
    assert len(clip) == pytest.approx(8_000, abs=1_200)  # lossy codecs add some silence
    # In the middle, it is the same tone.
    spectrum = np.abs(np.fft.rfft(clip[1_000:7_000] * np.hanning(6_000)))
    assert spectrum.argmax() * 16_000 / 6_000 == pytest.approx(440, abs=3)
    assert clip[1_000:7_000].std() == pytest.approx(0.5 / np.sqrt(2), abs=0.03)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
def test_resamples_accurately(decode: Decode, rate: int) -> None:
    _, clip = decode("audio", audio_file(tone(rate, 1.0), rate), **OPTIONS)
    assert len(clip) == 16_000
    # The ends of a clip ring in any filter.
    assert np.abs(clip - tone(16_000, 1.0))[200:-200].max() < 2e-3


def test_removes_what_the_lower_rate_cannot_hold(decode: Decode) -> None:
    _, clip = decode("audio", audio_file(tone(48_000, 1.0, hertz=11_000), 48_000), **OPTIONS)
    assert np.abs(clip[500:-500]).max() < 1e-3


def test_takes_mean_of_channels(decode: Decode) -> None:
    one = tone(16_000)
    _, clip = decode("audio", audio_file(np.stack([one, np.zeros_like(one)]), 16_000), **OPTIONS)
    assert np.abs(clip - one / 2).max() < 1e-6
    _, clip = decode("audio", audio_file(np.stack([one, -one]), 16_000), **OPTIONS)
    assert np.abs(clip).max() < 1e-6


@pytest.mark.parametrize("channels", [6, 8, 9, 24])
def test_reads_any_number_of_channels(decode: Decode, channels: int) -> None:
    by_sample = (tone(16_000)[:, None] * np.linspace(0, 1, channels) * 32_767).astype("<i2")
    form = struct.pack("<HHIIHH", 1, channels, 16_000, 32_000 * channels, 2 * channels, 16)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", by_sample.nbytes)
    file = b"RIFF" + struct.pack("<I", len(chunks) + by_sample.nbytes) + chunks + by_sample.tobytes()
    _, clip = decode("audio", file, **OPTIONS)
    assert np.abs(clip - by_sample.mean(axis=1) / 32_768).max() < 1e-6


def test_keeps_samples_of_the_same_rate(decode: Decode) -> None:
    _, clip = decode("audio", audio_file(tone(16_000), 16_000), **OPTIONS)
    assert np.array_equal(clip, tone(16_000))


def spoilt(value: float) -> bytes:
    samples = tone(16_000).copy()
    samples[100] = value
    return audio_file(samples, 16_000)


def with_rate(rate: int) -> bytes:
    data = bytearray(audio_file(rate=16_000, codec="pcm_s16le"))
    data[24:28] = struct.pack("<I", rate)
    return bytes(data)


REFUSED: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "nothing": (b"", {}, "empty"),
    "noise": (b"\x00\xff" * 500, {}, "broken, or is not an audio clip"),
    "head only": (audio_file()[:44], {}, "broken|no samples"),
    "NaN": (spoilt(float("nan")), {}, "not finite"),
    "infinity": (spoilt(float("inf")), {}, "not finite"),
    "overflow": (spoilt(1e30), {}, "far too large"),
    "slow": (with_rate(1), {}, "sample rate"),
    "fast": (with_rate(4_000_000), {}, "sample rate"),
    "long": (audio_file(), {"max_seconds": 0.25}, "--max-audio-seconds"),
    "too large for memory": (audio_file(), {"sample_rate": 8_000_000}, "--media-memory"),
    "silent video": (video_file(), {}, "no audio"),
    "image": (image_file("PNG"), {}, "broken, or is not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(decode: Decode, name: str) -> None:
    data, options, message = REFUSED[name]
    with pytest.raises(MediaError, match=message):
        decode("audio", data, **{**OPTIONS, **options})


@given(place=st.sampled_from(FORMATS), mutation=MUTATIONS)
def test_mutated_file_is_decoded_or_refused(decode: Decode, place: tuple[str, str], mutation: Mutation) -> None:
    try:
        _, clip = decode("audio", mutation.of(FILES[place]), **OPTIONS)
    except MediaError:
        return
    assert np.isfinite(clip).all()
    assert len(clip) <= 160_000


FILES = {place: audio_file(rate=48_000, format=place[0], codec=place[1]) for place in FORMATS}
