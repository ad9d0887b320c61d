"""Counts of the tokens that reservations looked for in the cache, and of the tokens that they found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lookups:
    """Totals of the lookups so far."""

    queried_tokens: int = 0
    """Tokens of full blocks: the most that could be cached. For encodings these are rows."""
    cached_tokens: int = 0
    """Tokens that were found in the cache."""

    def add(self, queried_tokens: int, cached_tokens: int) -> None:
        self.queried_tokens += queried_tokens
        self.cached_tokens += cached_tokens
