"""The tokens that stand in a prompt for an image, a video or audio. Pure values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from paceline.core.media import Grid, MediaInput
from paceline.services.gateway.planning.media.items import MediaItem


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A run of placeholder tokens for one input of an encoder."""

    token_id: int
    input: MediaInput
    digest: bytes
    """The input's digest, which is computed only once because an input may have megabytes."""
    grid: Grid | None = None
    """As in `MediaSpan`."""

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
        """Bytes of its inputs."""
        return sum(len(piece.input.data) for piece in self.pieces if isinstance(piece, TokenRun))

    @property
    def tokens(self) -> int:
        """Its placeholder tokens."""
        return sum(piece.input.length for piece in self.pieces if isinstance(piece, TokenRun))

    @property
    def digest(self) -> str:
        """The digest of its inputs."""
        return hashlib.sha256(
            b"".join(piece.digest for piece in self.pieces if isinstance(piece, TokenRun))
        ).hexdigest()


Expansions: TypeAlias = Mapping[MediaItem, Expansion]
"""What stands in prompts for the items of a request."""


class _Nothing(dict[MediaItem, Expansion]):
    def __missing__(self, item: MediaItem) -> Expansion:
        return Expansion()

    def __contains__(self, item: object) -> bool:
        # No item counts as left out while media are not loaded yet.
        return True


NOTHING: Expansions = _Nothing()
"""Nothing for any item: for plans whose prompt is not computed, and to find other errors of a request first."""
NO_ITEMS: Expansions = MappingProxyType({})
"""What requests without media have."""
