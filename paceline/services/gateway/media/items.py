"""Media as a request names them, and the tokens that stand for them in prompts. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

ItemKind: TypeAlias = Literal["image", "video", "audio"]

SAMPLING_RATE = 16_000
"""Samples per second of decoded audio, which all common models of speech expect."""


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, a video or an audio clip in a request."""

    kind: ItemKind
    url: str | None
    """An http, https, data or file URL. None if the client sends only the `uuid` of an item that it has sent before."""
    uuid: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MediaTokens:
    """The tokens of a model that belong to media."""

    markers: Mapping[ItemKind, tuple[int, ...]] = field(default_factory=dict)
    """The ids of the text that the model's chat template writes for one item. A kind without one is not supported."""
    reserved: frozenset[int] = frozenset()
    """Ids of tokens that only media bring into a prompt. A text that spells them stays a text."""


NO_MEDIA = MediaTokens()
