"""Counts of the tokens that reservations looked for in the cache, and of the tokens that they found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lookups:
    """Totals of all lookups so far."""

    queried_tokens: int = 0
    """Number of tokens in the full blocks that were looked up: the most that could be found. For encodings, rows."""
    cached_tokens: int = 0
    """Number of tokens that were found in the cache. For encodings, rows."""

    def add(self, queried_tokens: int, cached_tokens: int) -> None:
        self.queried_tokens += queried_tokens
        self.cached_tokens += cached_tokens
