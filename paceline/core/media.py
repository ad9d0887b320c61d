"""Images, frames of videos and audio in a prompt. Pure values, no tensors.

The prompt has a run of *placeholder* tokens for each item. The model reads rows of the item's *encoding* instead of the
embeddings of these tokens. An encoder computes the encoding from a `MediaInput`, which a gateway has made.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

DIGEST_BYTES = 16

Grid = tuple[int, int, int]
"""Numbers of frames, rows and columns."""


class MediaKind(enum.Enum):
    """The kind of an encoder's input. A frame of a video, or in some models a pair of frames, is encoded by itself."""

    IMAGE = "image"
    VIDEO_FRAME = "video_frame"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A run of placeholder tokens in a context, and the encoding whose rows the model reads there.

    Rows [0, length) of the encoding belong to tokens [start, start + length).
    """

    start: int
    length: int
    digest: bytes
    """The name of the encoding's input, from `MediaInput.digest`."""
    kind: MediaKind
    grid: Grid | None = None
    """Frames, rows and columns of the placeholder tokens, in models whose positions have three dimensions (M-RoPE).
    Their product is `length`."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class MediaInput:
    """The input of an encoder for one span, after decoding and resizing."""

    kind: MediaKind
    length: int
    """Number of tokens of the span, which is the number of rows of the encoding."""
    dtype: str
    """Name of the elements' type, as in numpy."""
    shape: tuple[int, ...]
    data: bytes
    """The elements in C order, little endian."""

    @property
    def digest(self) -> bytes:
        """Hash of the input. By the same encoder, inputs with equal digests have equal encodings."""
        described = repr((self.kind.value, self.length, self.dtype, self.shape)).encode()
        return hashlib.sha256(described + b"\0" + self.data).digest()[:DIGEST_BYTES]
