"""Hints: predictions of clients and gateways about the next use of a context after its request has ended.

A hint changes no name and no token, and it pins nothing. It is evidence. A policy counts how often the hints of each
source come true, and believes them accordingly.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_HINTS = 8
"""Largest number of hints about one context."""

MOST_SOURCE_BYTES = 16
"""Longest name of a source."""


@dataclass(frozen=True, slots=True)
class Hint:
    """An expectation about the first tokens of a context."""

    tokens: int
    """Number of tokens at the front of the context whose blocks the hint is about."""
    seconds: float
    """Time within which these blocks are expected to be requested again."""
    source: bytes = b""
    """Name of the client or gateway that gives the hint, with its reason for the hint. Hints of a source count more if
    its hints often come true.
    """
