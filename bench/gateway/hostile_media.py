"""Hostile images, videos and audio clips, made from a seed, with the answers that a gateway may give to each."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image

from tests.services.gateway.planning.media.samples import (
    IMAGE_FORMATS,
    audio_file,
    data_url,
    image_file,
    picture,
    png,
    tone,
    video_file,
)

REFUSED, DEAD = frozenset({400}), frozenset({422})
READABLE = frozenset({200})
MAYBE = frozenset({200, 400})
"""A changed file may still be one that a decoder reads."""
REFUSED_OR_DEAD = REFUSED | DEAD

REFUSED_URLS = (
    "http://127.0.0.1/",
    "http://127.0.0.1:6379/",
    "http://10.0.0.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::1]/",
    "http://[::ffff:10.0.0.1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://2130706433/",
    "http://0x7f.1/",
    "http://localhost/",
    "http://secret.test/",
    "http://mapped.test/",
    "http://user@media.test/",
    "http://media.test:22/",
    "http://exa mple/",
    "gopher://media.test/",
    "file:///etc/passwd",
    "file:///dev/zero",
    "data:image/png;base64,%%%",
    "data:,plain",
    "cat.png",
)


@dataclass(frozen=True)
class Attack:
    """One hostile item."""

    name: str
    kind: str
    """image, video or audio."""
    url: str
    answers: frozenset[int]
    """The status codes that are right."""


Made = tuple[str, bytes | str, frozenset[int]]
"""The kind of an item, its file or its URL, and the answers that are right."""


class Attacks:
    """Makes hostile items of all kinds.

    Args:
        seed: equal seeds make equal items.
        urls: URLs of hostile servers, with the answers that are right.
    """

    def __init__(self, seed: int, urls: Mapping[str, frozenset[int]]) -> None:
        self._rng = random.Random(seed)
        gradient = Image.linear_gradient("L").convert("RGB")
        self._images = [image_file(format, gradient) for format in IMAGE_FORMATS]
        self._animations = [_animation(format) for format in ("GIF", "WEBP", "PNG")]
        self._video, self._clip = video_file(25, (64, 48)), audio_file(tone(16_000), 16_000)
        self._bombs = _bombs()
        self._long_video = _long_video()
        self._large = image_file("PNG", Image.new("L", (8000, 8000)))
        self._urls = list(urls.items())
        self._kinds: dict[str, tuple[float, Callable[[], Made]]] = {
            "changed file": (8, self._changed),
            "truncated file": (20, self._truncated),
            "wrong type": (20, self._wrong_type),
            "noise": (8, lambda: ("image", self._rng.randbytes(self._rng.randint(0, 5000)), REFUSED)),
            "SVG": (8, lambda: ("image", _svg(self._rng.randrange(1000)), REFUSED)),
            "animation": (2, lambda: ("image", self._rng.choice(self._animations), READABLE)),
            "broken animation": (4, lambda: ("image", self._cut(self._rng.choice(self._animations)), MAYBE)),
            "bomb": (8, lambda: ("image", self._rng.choice(self._bombs), REFUSED)),
            "largest image": (0.1, lambda: ("image", self._large, READABLE)),
            "audio that is not finite": (8, self._infinite),
            "audio of years": (4, lambda: ("audio", audio_file(tone(1000), 1, "wav", "pcm_s16le"), REFUSED)),
            "audio that is too long": (1, lambda: ("audio", audio_file(tone(8000, 40), 8000), REFUSED)),
            "video that is too long": (4, lambda: ("video", self._long_video, REFUSED)),
            "URL that is not allowed": (20, self._refused_url),
            "URL": (40, lambda: ("image", *self._rng.choice(self._urls))),
        }

    def next(self) -> Attack:
        """Return the next item."""
        weights = [weight for weight, _ in self._kinds.values()]
        (name,) = self._rng.choices(list(self._kinds), weights)
        kind, item, answers = self._kinds[name][1]()
        if name == "URL":
            name = str(item)
        return Attack(name, kind, item if isinstance(item, str) else data_url(item), answers)

    def _changed(self) -> Made:
        kind = self._rng.choice(("image", "video", "audio"))
        changed = bytearray(self._file(kind))
        for _ in range(self._rng.randint(1, 10)):
            changed[self._rng.randrange(len(changed))] = self._rng.randrange(256)
        return kind, bytes(changed), MAYBE

    def _truncated(self) -> Made:
        kind = self._rng.choice(("image", "video", "audio"))
        # Sound that is cut off can be heard up to there.
        return kind, self._cut(self._file(kind)), MAYBE if kind == "audio" else REFUSED

    def _wrong_type(self) -> Made:
        files = {
            "image": (self._video, self._clip, b"<!doctype html><p>not found</p>", b"%PDF-1.7\n", b"PK\3\4", b""),
            "video": (*self._images[:2], self._clip, b"#EXTM3U\n/etc/passwd\n", b"ffconcat version 1.0\nfile a\n", b""),
            "audio": (*self._images[:2], self._video, b"RIFF....WAVE", b"ID3", b""),
        }
        kind = self._rng.choice(list(files))
        return kind, self._rng.choice(files[kind]), REFUSED

    def _infinite(self) -> Made:
        samples = tone(16_000)
        samples[self._rng.randrange(len(samples))] = self._rng.choice((np.nan, np.inf, -np.inf, 1e30))
        return "audio", audio_file(samples, 16_000), REFUSED

    def _refused_url(self) -> Made:
        return self._rng.choice(("image", "video", "audio")), self._rng.choice(REFUSED_URLS), REFUSED

    def _file(self, kind: str) -> bytes:
        return {"image": self._rng.choice(self._images), "video": self._video, "audio": self._clip}[kind]

    def _cut(self, data: bytes) -> bytes:
        return data[: self._rng.randrange(len(data) // 2)]


def _animation(format: str) -> bytes:
    """Return 20 frames of a format that has animations."""
    frames = [picture(64, 48).rotate(18 * turn) for turn in range(20)]
    return image_file(format, frames[0], save_all=True, append_images=frames[1:], duration=50)


def _bombs() -> list[bytes]:
    """Return small files that claim to have, or do have, very much in them."""
    text = b"Comment\0\0" + zlib.compress(bytes(64 << 20), 9)
    plain = png(4, 4, bytes(4 * 13))
    with_text = plain[:33] + _chunk(b"zTXt", text) + plain[33:]
    wide = io.BytesIO()
    Image.new("P", (1, 1)).save(wide, "GIF")
    claims = bytearray(wide.getvalue())
    claims[6:10] = struct.pack("<HH", 65_535, 65_535)
    return [png(60_000, 60_000, b""), png(9000, 9000, bytes(9000 * 27_001)), with_text, bytes(claims)]


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _long_video() -> bytes:
    """Return a small video of 24 frames, each of which is shown for a minute."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=Fraction(1, 60))
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for _ in range(24):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((16, 32, 3), np.uint8))))
        container.mux(stream.encode())
    return file.getvalue()


def _svg(number: int) -> bytes:
    return (
        f"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg' id='s{number}'>"
        "<image href='file:///etc/passwd'/></svg>"
    ).encode()
