"""Media as a request names them, and the tokens that stand for them in prompts. Pure values."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from paceline.core.media import Grid, MediaInput

ItemKind: TypeAlias = Literal["image", "video", "audio"]

JPEG = b"\xff\xd8\xff"
"""The first bytes of a JPEG file."""
SAMPLING_RATE = 16_000
"""Samples per second of decoded audio, which all common models of speech expect."""


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, a video or an audio clip in a request."""

    kind: ItemKind
    url: str | None
    """An http, https, data or file URL; None if the client sends only the `uuid` of an item that it has sent before."""
    uuid: str | None = None
    digest: str = ""
    """Digest of the item that the uuid must stand for, see `Expansion.digest`; "" if it may stand for any."""
    place: str = field(default="", compare=False)
    """The item's path in the request, such as `messages[0].content[1]`; "" if the path is not known."""


def places_of(items: Sequence[MediaItem]) -> list[str]:
    """Return a name for each item in errors: its path, or else its kind and its number within the kind ("image 2")."""
    counts: Counter[str] = Counter()
    places = []
    for item in items:
        counts[item.kind] += 1
        places.append(item.place or f"{item.kind} {counts[item.kind]}")
    return places


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The size to which an image is resized."""

    height: int
    width: int
    resample: int
    """Number of the filter, one of Pillow's `Image.Resampling`."""


Fit: TypeAlias = Callable[[int, int], ImageSize | None]
"""A function of an image's height and width. It returns the size to which the image is resized; None keeps the size.

The function raises InvalidRequestError if the image is refused.
"""


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """The frames of a video that a model's processor wants, spread evenly over the whole video."""

    most: int
    """Largest number of frames. A video with fewer frames gives each of them once."""
    least: int = 1
    """Smallest number of frames, if the video has so many."""
    per_second: float | None = None
    """Wanted frames per second of video; None wants `most` frames."""
    to_end: bool = False
    """Whether the video's last frame is sampled. If not, the sampled frames are the first ones of equal parts."""
    max_pixels: int | None = None
    """Largest number of pixels of a frame. Larger frames are scaled down in proportion; None never scales them."""
    total_pixels: int | None = None
    """Largest number of pixels of all frames together, by scaling each down equally; None never scales."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaTokens:
    """The tokens of a model that belong to media."""

    markers: Mapping[ItemKind, tuple[int, ...]] = field(default_factory=dict)
    """Token ids, by kind, of the marker that the chat template writes for one item. Other kinds are not supported."""
    reserved: frozenset[int] = frozenset()
    """Ids of tokens that only media bring into a prompt. A client's text that spells such a token stays text."""


NO_MEDIA = MediaTokens()


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A run of placeholder tokens for one input of an encoder."""

    token_id: int
    input: MediaInput
    digest: bytes
    """Digest of the input. It is kept because an input may have megabytes."""
    grid: Grid | None = None
    """Frames, rows and columns of the placeholders; see `MediaSpan.grid`."""

    @staticmethod
    def of(token_id: int, own: MediaInput, grid: Grid | None = None) -> TokenRun:
        return TokenRun(token_id, own, own.digest, grid)


Piece: TypeAlias = str | int | TokenRun
"""A part of a prompt: a text, the id of one token, or a run of placeholder tokens."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """The expansion of an item: the tokens that stand for the item in a prompt, with the inputs of the encoder."""

    pieces: tuple[Piece, ...] = ()

    @property
    def size(self) -> int:
        """Size of the item's inputs, in bytes."""
        return sum(len(piece.input.data) for piece in self.pieces if isinstance(piece, TokenRun))

    @property
    def tokens(self) -> int:
        """Number of the item's placeholder tokens."""
        return sum(piece.input.length for piece in self.pieces if isinstance(piece, TokenRun))

    @property
    def digest(self) -> str:
        """SHA-256 of the digests of the item's inputs, in hex."""
        return hashlib.sha256(
            b"".join(piece.digest for piece in self.pieces if isinstance(piece, TokenRun))
        ).hexdigest()


Expansions: TypeAlias = Mapping[MediaItem, Expansion]
"""The expansion of each item of a request: the tokens that stand for it in prompts."""


class _Nothing(dict[MediaItem, Expansion]):
    def __missing__(self, item: MediaItem) -> Expansion:
        return Expansion()

    def __contains__(self, item: object) -> bool:
        # No item counts as left out while media are not loaded yet.
        return True


NOTHING: Expansions = _Nothing()
"""An empty expansion for any item: for prompts that are not computed, and to find a request's other errors first."""
NO_ITEMS: Expansions = MappingProxyType({})
"""The expansions of a request without media."""
