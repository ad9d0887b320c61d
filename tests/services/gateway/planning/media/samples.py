"""Small files of every kind, made by the encoders of the same libraries."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def data_url(data: bytes, mime: str = "") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def picture(width: int = 6, height: int = 4) -> Image.Image:
    """Return an image with a red left and a blue right half."""
    image = Image.new("RGB", (width, height), "red")
    image.paste("blue", (width // 2, 0, width, height))
    return image


def image_file(format: str = "PNG", image: Image.Image | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    (image or picture()).save(file, format, **options)
    return file.getvalue()


def png(width: int, height: int, rows: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """Return a PNG whose head need not fit its rows.

    Args:
        rows: each row begins with a zero, because it has no filter.
        depth: bits of a channel.
        colour: number of PNG's colour type; 2 is RGB.
    """

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    packed = zlib.compress(rows, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def video_file(
    count: int = 20,
    size: tuple[int, int] = (32, 16),
    format: str = "mp4",
    codec: str = "mpeg4",
    matrix: list[int] | None = None,
    gop: int = 6,
    b_frames: int | None = None,
    hidden: int = 0,
) -> bytes:
    """Return a video of 10 frames per second. Frame i is of grey 10 * i, except for its upper left quarter, which is
    white.

    Args:
        gop: the largest distance of key frames.
        b_frames: the most B-frames in a row; None leaves it to the encoder.
        hidden: frames at the beginning that an edit list of mp4 hides, as if the video had been cut.
    """
    file = io.BytesIO()
    with av.open(file, "w", format=format, options={"avoid_negative_ts": "disabled"} if hidden else {}) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.gop_size = gop
        if b_frames is not None:
            stream.options = {"bf": str(b_frames), "b-adapt": "0"}  # The latter, of H.264, wants exactly so many.
        if matrix:
            stream.set_display_matrix(matrix)
        for number in range(count):
            pixels = np.full((size[1], size[0], 3), 10 * number, np.uint8)
            pixels[: size[1] // 2, : size[0] // 2] = 255
            frame = av.VideoFrame.from_ndarray(pixels)
            frame.pts, frame.time_base = number - hidden, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def tone(rate: int = 44_100, seconds: float = 0.5, hertz: float = 440.0) -> NDArray[np.float32]:
    return (np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate) / 2).astype(np.float32)


def audio_file(
    samples: NDArray[np.float32] | None = None, rate: int = 44_100, format: str = "wav", codec: str = "pcm_f32le"
) -> bytes:
    """Return an audio clip.

    Args:
        samples: [samples], or [2, samples] for two channels.
    """
    samples = np.atleast_2d(tone(rate) if samples is None else samples)
    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        stream = container.add_stream(codec, rate=rate, layout="stereo" if len(samples) == 2 else "mono")
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples.T.reshape(1, -1)), "flt", "stereo" if len(samples) == 2 else "mono"
        )
        frame.sample_rate = rate
        resampler = av.AudioResampler(stream.format, stream.layout, rate, frame_size=stream.frame_size or None)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(part))
        container.mux(stream.encode())
    return file.getvalue()


@dataclass(frozen=True)
class Mutation:
    """Bytes of a file that change, and the place of its new end. Places are counted modulo the file's size."""

    changes: list[tuple[int, int]]
    end: int

    def of(self, data: bytes) -> bytes:
        """Return the changed file. In half of all cases it is whole."""
        changed = bytearray(data)
        for place, value in self.changes:
            changed[place % len(data)] = value
        return bytes(changed[: max(1, self.end % (2 * len(data)))])


MUTATIONS = st.builds(
    Mutation,
    changes=st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 255)), max_size=12),
    end=st.integers(0, 100_000),
)
