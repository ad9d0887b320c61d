"""The limits of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.media import MediaKind


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that are fixed while an engine runs."""

    max_batched_tokens: int
    """Largest number of tokens of one step; at least max_seqs. A step has more only if a span of `whole_media` does not
    fit."""
    max_model_len: int
    max_seqs: int
    """Number of rows: most requests that run at the same time."""
    max_drafts: int = 0
    """Largest number of draft tokens of one request in one step."""
    whole_media: frozenset[MediaKind] = frozenset()
    """Kinds of media whose spans are computed in one step each; see `ModelFacts`."""
