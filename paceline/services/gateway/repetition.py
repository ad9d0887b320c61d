"""Detection of answers that repeat themselves without end."""

from __future__ import annotations

from paceline.services.gateway.schemas import RepetitionDetection

REPETITION = "repetition"
"""The finish reason of such an answer, as in vLLM."""


class RepetitionDetector:
    """The tokens of one answer, and whether a pattern of tokens comes at their end as often as `wanted` says."""

    def __init__(self, wanted: RepetitionDetection) -> None:
        self._sizes = range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1)
        self._count = wanted.min_count
        self._tokens: list[int] = []

    def push(self, token_id: int) -> bool:
        """Take the next token. Return whether the answer repeats itself now."""
        tokens = self._tokens
        tokens.append(token_id)
        return any(
            tokens[-1 - size] == token_id and self._repeats(size)
            for size in self._sizes[: max(0, len(tokens) // self._count - self._sizes.start + 1)]
        )

    def _repeats(self, size: int) -> bool:
        """Return whether the tokens at the end, without the first pattern, equal the tokens one pattern before them."""
        tokens, length = self._tokens, size * (self._count - 1)
        return tokens[-length:] == tokens[-length - size : -size]
