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
    """An http, https, data or file URL. None if the client sends only the `uuid` of an item that it has sent before."""
    uuid: str | None = None
    digest: str = ""
    """The digest of what the uuid must mean; "" if it may mean anything."""
    place: str = field(default="", compare=False)
    """Where it is in the request, such as `messages[0].content[1]`; "" if this is not known."""


def places_of(items: Sequence[MediaItem]) -> list[str]:
    """Return names of items for errors: their places, or else their kinds and their numbers among all of the kind."""
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
    """The number of one of Pillow's filters."""


Fit: TypeAlias = Callable[[int, int], ImageSize | None]
"""A function that returns the size to which an image of some height and width is resized; None leaves it as it is.

It raises InvalidRequestError if the image is refused.
"""


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """The frames of a video that a model's processor wants, spread evenly over the whole video."""

    most: int
    """The largest number of frames. A video that has fewer gives each frame once."""
    least: int = 1
    """The smallest number of frames, if the video has so many."""
    per_second: float | None = None
    """Wanted frames for each second of the video; None wants `most`."""
    to_end: bool = False
    """Whether the last frame of the video is among them. If not, they are the first frames of equal parts."""
    max_pixels: int | None = None
    """A frame with more pixels is scaled down to at most this many, with the same aspect ratio; None never scales."""
    total_pixels: int | None = None
    """The same for all frames together."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaTokens:
    """The tokens of a model that belong to media."""

    markers: Mapping[ItemKind, tuple[int, ...]] = field(default_factory=dict)
    """The ids of the text that the model's chat template writes for one item. A kind without one is not supported."""
    reserved: frozenset[int] = frozenset()
    """Ids of tokens that only media bring into a prompt. A text that spells them stays a text."""


NO_MEDIA = MediaTokens()


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A run of placeholder tokens for one input of an encoder."""

    token_id: int
    input: MediaInput
    digest: bytes
    """The input's digest, which is computed only once because an input may have megabytes."""
    grid: Grid | None = None
    """See `MediaSpan.grid`."""

    @staticmethod
    def of(token_id: int, own: MediaInput, grid: Grid | None = None) -> TokenRun:
        return TokenRun(token_id, own, own.digest, grid)


Piece: TypeAlias = str | int | TokenRun
"""A part of a prompt: a text, the id of a token, or placeholder tokens."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """The tokens that stand in a prompt for one item."""

    pieces: tuple[Piece, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the item's inputs."""
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
"""For each item of a request, the tokens that stand for it in prompts."""


class _Nothing(dict[MediaItem, Expansion]):
    def __missing__(self, item: MediaItem) -> Expansion:
        return Expansion()

    def __contains__(self, item: object) -> bool:
        # No item counts as left out while media are not loaded yet.
        return True


NOTHING: Expansions = _Nothing()
"""Nothing for any item: for plans whose prompt is not computed, and to find other errors of a request first."""
NO_ITEMS: Expansions = MappingProxyType({})
"""The expansions of a request without media."""
