"""The limits of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.media import MediaKind


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that are fixed while an engine runs."""

    max_batched_tokens: int
    """Largest number of tokens of one step; at least max_seqs. A step has more tokens only if it computes a span of
    `whole_media` or a `bidirectional` context that is longer.
    """
    max_model_len: int
    max_seqs: int
    """Number of rows: the largest number of requests that run at the same time."""
    max_drafts: int = 0
    """Largest number of draft tokens of one request in one step."""
    whole_media: frozenset[MediaKind] = frozenset()
    """Kinds of media whose spans must not be cut: one step computes all tokens of a span (`ModelFacts.whole_media`)."""
    bidirectional: bool = False
    """Whether one step computes all tokens of a context (`ModelFacts.bidirectional`)."""
    max_adapters: int = 0
    """Largest number of adapters of one step; 0 if requests have none."""
