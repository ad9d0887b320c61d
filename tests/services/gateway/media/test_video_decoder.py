"""Frames are spread evenly over a video. What the file says about itself is not trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.services.gateway.errors import MediaError
from paceline.services.gateway.media.video_decoder import sample
from tests.services.gateway.media.conftest import Decode
from tests.services.gateway.media.samples import MUTATIONS, Mutation, audio_file, image_file, video_file

OPTIONS: dict[str, Any] = {
    "max_pixels": 1 << 20,
    "max_seconds": 60.0,
    "frames": 5,
    "frame_pixels": None,
}
CONTAINERS = [
    ("mp4", "mpeg4"),
    ("mp4", "h264"),
    ("matroska", "mpeg4"),
    ("webm", "libvpx-vp9"),
    ("avi", "mpeg4"),
    ("mpegts", "mpeg2video"),
]
TURNED_RIGHT = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]
"""The display matrix that a phone writes when it is held upright: turn clockwise to show."""


def test_samples_evenly() -> None:
    assert sample(10, 4) == [0, 2, 5, 7]
    assert sample(3, 8) == [0, 1, 2]


@given(st.integers(1, 10_000), st.integers(1, 1000))
def test_samples_within_bounds(total: int, most: int) -> None:
    chosen = sample(total, most)
    assert len(chosen) == min(most, total)
    assert chosen == sorted(set(chosen))
    assert chosen[0] == 0
    assert chosen[-1] < total


@pytest.mark.parametrize(("format", "codec"), CONTAINERS)
def test_reads_frames_at_their_times(decode: Decode, format: str, codec: str) -> None:
    facts, frames = decode("video", video_file(format=format, codec=codec), **OPTIONS)
    assert (frames.shape, frames.dtype) == ((5, 16, 32, 3), np.uint8)
    assert facts["timestamps"] == pytest.approx([0.0, 0.4, 0.8, 1.2, 1.6], abs=0.002)
    assert frames[:, 12, 24].mean(axis=1) == pytest.approx([0, 40, 80, 120, 160], abs=12)


def test_skips_to_key_frames(decode: Decode) -> None:
    """Two of 20 frames, with other key frames in between."""
    facts, frames = decode("video", video_file(), **{**OPTIONS, "frames": 2})
    assert facts["timestamps"] == pytest.approx([0.0, 1.0], abs=0.002)
    assert frames[:, 12, 24].mean(axis=1) == pytest.approx([0, 100], abs=12)


def test_takes_every_frame_if_there_are_few(decode: Decode) -> None:
    facts, frames = decode("video", video_file(count=3), **OPTIONS)
    assert len(frames) == len(facts["timestamps"]) == 3


def test_scales_frames_down(decode: Decode) -> None:
    _, frames = decode("video", video_file(size=(64, 32)), **{**OPTIONS, "frame_pixels": 512})
    assert frames.shape == (5, 16, 32, 3)


def test_turns_frames(decode: Decode) -> None:
    _, frames = decode("video", video_file(matrix=TURNED_RIGHT), **OPTIONS)
    assert frames.shape == (5, 32, 16, 3)
    # The white quarter was at the upper left, and the picture is turned clockwise.
    assert frames[0, 4, 12].mean() > 200
    assert frames[0, 4, 4].mean() < 60


def test_reads_animation(decode: Decode) -> None:
    facts, frames = decode("video", image_file("GIF"), **OPTIONS)
    assert (len(frames), facts["timestamps"].tolist()) == (1, [0.0])


REFUSED: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "nothing": (b"", {}, "empty"),
    "noise": (b"\x00\xff" * 500, {}, "broken, or is not a video"),
    "half": (video_file()[:600], {}, "broken|no video"),
    "audio": (audio_file(), {}, "no video"),
    "long": (video_file(), {"max_seconds": 1.5}, "--max-video-seconds"),
    "large frames": (video_file(), {"max_pixels": 500}, "--max-image-pixels"),
    "many large frames": (video_file(size=(1024, 768), count=5), {}, "--media-memory"),
    "playlist": (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n", {}, "broken, or is not"),
    "list of files": (b"ffconcat version 1.0\nfile /etc/passwd\n", {}, "broken, or is not"),
    "page": (b"<html>", {}, "web page"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(decode: Decode, name: str) -> None:
    data, options, message = REFUSED[name]
    with pytest.raises(MediaError, match=message):
        decode("video", data, **{**OPTIONS, **options})


@settings(max_examples=60)
@given(place=st.sampled_from(CONTAINERS), mutation=MUTATIONS)
def test_mutated_file_is_decoded_or_refused(decode: Decode, place: tuple[str, str], mutation: Mutation) -> None:
    try:
        facts, frames = decode("video", mutation.of(FILES[place]), **OPTIONS)
    except MediaError:
        return
    assert len(frames) == len(facts["timestamps"]) <= 5


FILES = {place: video_file(format=place[0], codec=place[1]) for place in CONTAINERS}
