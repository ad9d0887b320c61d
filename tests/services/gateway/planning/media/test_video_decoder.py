"""Frames are spread evenly over a video. What the file says about itself is not trusted."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paceline.services.gateway.http.errors import MediaError
from paceline.services.gateway.planning.media import video_decoder
from paceline.services.gateway.planning.media.container import BrokenItemError
from paceline.services.gateway.planning.media.items import FrameSampling
from paceline.services.gateway.planning.media.video_decoder import sample
from tests.services.gateway.planning.media.conftest import Decode
from tests.services.gateway.planning.media.samples import (
    MUTATIONS,
    Mutation,
    audio_file,
    image_file,
    picture,
    video_file,
)

OPTIONS: dict[str, Any] = {"max_pixels": 1 << 20, "max_seconds": 60.0, "sampling": {"most": 5}}
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
    assert sample(10, 25.0, FrameSampling(4)) == [0, 2, 5, 7]
    assert sample(3, 25.0, FrameSampling(8)) == [0, 1, 2]
    assert sample(10, 25.0, FrameSampling(4, to_end=True)) == [0, 3, 6, 9]
    assert sample(10, 25.0, FrameSampling(1, to_end=True)) == [0]


@pytest.mark.parametrize(
    ("total", "rate", "count"),
    [(100, 25.0, 8), (100, 30.0, 6), (10, 25.0, 4), (3, 25.0, 3), (10_000, 25.0, 20), (100, 1e-9, 20), (100, 1e9, 4)],
)
def test_samples_by_rate(total: int, rate: float, count: int) -> None:
    """Two frames a second, at least 4 and at most 20. The file says what its rate is, so it may be anything."""
    assert len(sample(total, rate, FrameSampling(20, 4, 2.0))) == count


@pytest.mark.parametrize("count", [1, 2, 9])
def test_jpeg_files_are_the_frames_of_a_video(decode: Decode, count: int) -> None:
    thumbnail = image_file("JPEG", picture(4, 4))
    frames = [picture(32, 16).point(lambda value, step=index: value * (step + 1) // 10) for index in range(count)]
    files = [image_file("JPEG", frame, quality=95, subsampling=0, comment=thumbnail) for frame in frames]
    facts, array = decode("video", b"".join(files), **OPTIONS)
    numbers = sample(count, 1.0, FrameSampling(5))
    assert facts["timestamps"].tolist() == numbers
    expected = np.stack([np.asarray(Image.open(io.BytesIO(files[number])).convert("RGB")) for number in numbers])
    assert np.abs(array.astype(int) - expected).max() <= 1


def test_each_jpeg_file_is_turned_as_it_says(decode: Decode) -> None:
    upright = image_file("JPEG", picture(32, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right
    lying = image_file("JPEG", picture(32, 16).rotate(90, expand=True), exif=exif)
    for files, shape in (((upright, lying), (16, 32, 3)), ((lying, upright), (16, 32, 3))):
        _, array = decode("video", b"".join(files), **OPTIONS)
        assert array.shape[1:] == shape
        assert np.abs(array[0].astype(int) - array[1]).mean() < 8


samplings = st.builds(
    FrameSampling,
    st.integers(1, 1000),
    st.integers(1, 1000),
    st.none() | st.floats(0.01, 1000),
    to_end=st.booleans(),
)


@given(st.integers(1, 10_000), st.floats(1e-9, 1e9), samplings)
def test_samples_within_bounds(total: int, rate: float, sampling: FrameSampling) -> None:
    chosen = sample(total, rate, sampling)
    assert 1 <= len(chosen) <= min(sampling.most, total)
    assert chosen == sorted(set(chosen))
    assert chosen[0] == 0
    assert chosen[-1] < total
    if sampling.to_end and len(chosen) > 1:
        assert chosen[-1] == total - 1


@pytest.mark.parametrize(("format", "codec"), CONTAINERS)
def test_reads_frames_at_their_times(decode: Decode, format: str, codec: str) -> None:
    facts, frames = decode("video", video_file(format=format, codec=codec), **OPTIONS)
    assert (frames.shape, frames.dtype) == ((5, 16, 32, 3), np.uint8)
    assert facts["timestamps"] == pytest.approx([0.0, 0.4, 0.8, 1.2, 1.6], abs=0.002)
    assert frames[:, 12, 24].mean(axis=1) == pytest.approx([0, 40, 80, 120, 160], abs=12)


def test_skips_to_key_frames(decode: Decode) -> None:
    """Two of 20 frames, with other key frames in between."""
    facts, frames = decode("video", video_file(), **{**OPTIONS, "sampling": {"most": 2}})
    assert facts["timestamps"] == pytest.approx([0.0, 1.0], abs=0.002)
    assert frames[:, 12, 24].mean(axis=1) == pytest.approx([0, 100], abs=12)


def test_finds_frames_between_key_frames_that_are_close_together(decode: Decode) -> None:
    """The index of AVI is in the order of decoding, so that seeking a key frame may find a later one."""
    for most in (20, 10, 5):
        options = {**OPTIONS, "sampling": {"most": most}}
        facts, frames = decode("video", video_file(format="avi", gop=2, b_frames=2), **options)
        numbers = range(0, 20, 20 // most)
        assert facts["timestamps"] == pytest.approx([number / 10 for number in numbers], abs=0.002)
        assert frames[:, 12, 24].mean(axis=1) == pytest.approx([10 * number for number in numbers], abs=8)


@pytest.mark.parametrize("most", [20, 5, 2])
def test_frames_of_avi_are_counted_if_their_times_are_those_of_decoding(decode: Decode, most: int) -> None:
    file = video_file(size=(64, 48), format="avi", codec="h264", gop=20, b_frames=3)
    facts, frames = decode("video", file, **{**OPTIONS, "sampling": {"most": most}})
    numbers = range(0, 20, 20 // most)
    assert facts["timestamps"] == pytest.approx([number / 10 for number in numbers], abs=0.002)
    assert frames[:, 40, 40].mean(axis=1) == pytest.approx([10 * number for number in numbers], abs=4)


def test_decodes_from_the_beginning_if_the_index_leads_nowhere_else() -> None:
    file = memoryview(video_file(format="avi", gop=2, b_frames=2))
    with video_decoder._open(file, 1 << 20) as (container, stream):
        begin = next(container.demux(stream)).dts
        assert begin is not None
        frames = video_decoder._decode_from(container, stream, (begin + 13, begin + 7, begin), begin + 2)
        assert [frame.pts for frame in frames] == [*range(begin + 1, begin + 21)]


@pytest.mark.parametrize(("codec", "b_frames"), [("mpeg4", 0), ("h264", 3)])
def test_frames_that_an_edit_list_hides_are_not_shown(decode: Decode, codec: str, b_frames: int) -> None:
    """Five of 20 frames are hidden, and the first key frame is one of them."""
    cut = video_file(codec=codec, b_frames=b_frames, gop=9, hidden=5)
    for sampling, numbers in (
        ({"most": 5}, [5, 8, 11, 14, 17]),
        ({"most": 20, "per_second": 2.0, "to_end": True}, [5, 12, 19]),
    ):
        facts, frames = decode("video", cut, **{**OPTIONS, "max_seconds": 1.6, "sampling": sampling})
        assert facts["timestamps"] == pytest.approx([(number - 5) / 10 for number in numbers], abs=0.002)
        assert frames[:, 12, 24].mean(axis=1) == pytest.approx([10 * number for number in numbers], abs=4)


def test_hidden_frames_count_as_frames_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = memoryview(video_file(hidden=5))
    for most in (20, 19):
        monkeypatch.setattr(video_decoder, "_MAX_FRAMES", most)
        with contextlib.nullcontext() if most == 20 else pytest.raises(BrokenItemError, match="more than 19 frames"):
            video_decoder.decode(cut, 1 << 20, **OPTIONS)


def test_takes_every_frame_if_there_are_few(decode: Decode) -> None:
    facts, frames = decode("video", video_file(count=3), **OPTIONS)
    assert len(frames) == len(facts["timestamps"]) == 3


def test_scales_frames_down(decode: Decode) -> None:
    for bound in ({"max_pixels": 512}, {"total_pixels": 5 * 512}, {"max_pixels": 4096, "total_pixels": 5 * 512 + 4}):
        _, frames = decode("video", video_file(size=(64, 32)), **{**OPTIONS, "sampling": {"most": 5, **bound}})
        assert frames.shape == (5, 16, 32, 3)


def test_reads_the_rate_of_a_video(decode: Decode) -> None:
    """Two seconds with 10 frames each."""
    for format, codec in CONTAINERS:
        sampling = {"most": 20, "per_second": 2.0, "to_end": True}
        facts, frames = decode("video", video_file(format=format, codec=codec), **{**OPTIONS, "sampling": sampling})
        assert len(frames) == 4
        assert facts["timestamps"] == pytest.approx([0.0, 0.6, 1.3, 1.9], abs=0.002)


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


FILES = {
    **{format + codec: video_file(format=format, codec=codec) for format, codec in CONTAINERS},
    "edit list": video_file(codec="h264", hidden=5),
    "many key frames": video_file(format="avi", gop=2, b_frames=2),
}


@given(name=st.sampled_from(list(FILES)), mutation=MUTATIONS, by_rate=st.booleans())
def test_mutated_file_is_decoded_or_refused(decode: Decode, name: str, mutation: Mutation, by_rate: bool) -> None:
    sampling = {"most": 5, "per_second": 2.0, "to_end": True} if by_rate else {"most": 5}
    try:
        facts, frames = decode("video", mutation.of(FILES[name]), **{**OPTIONS, "sampling": sampling})
    except MediaError:
        return
    assert len(frames) == len(facts["timestamps"]) <= 5
