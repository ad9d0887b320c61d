"""Detection of answers that repeat themselves without end."""

from __future__ import annotations

import numpy as np

from paceline.services.gateway.planning.schemas import RepetitionDetection

REPETITION = "repetition"
"""The finish reason of an answer that repeats itself, as in vLLM."""


class RepetitionDetector:
    """Detects that an answer ends with the same pattern of tokens several times in a row.

    The computation for a token grows linearly with the number of pattern sizes.

    Args:
        wanted: smallest and largest size of a pattern, in tokens, and the repetitions that it takes.
    """

    def __init__(self, wanted: RepetitionDetection) -> None:
        self._least, self._most = max(1, wanted.min_pattern_size), wanted.max_pattern_size
        sizes = np.arange(self._least, self._most + 1)
        self._needed = sizes * min(wanted.min_count - 1, 1 << 40)
        self._runs = np.zeros_like(sizes)
        """For each pattern size: how many tokens at the end of the answer equal the token `size` positions earlier."""
        self._recent = np.full(2 * self._most, -1)
        """Buffer of the latest tokens. The newest token is in front of the index `_end`."""
        self._end = self._most

    def push(self, token_id: int) -> bool:
        """Append the next token. Return whether the answer now ends with a pattern that is repeated often enough."""
        recent, most = self._recent, self._most
        before = recent[self._end - most : self._end - self._least + 1]
        self._runs = (self._runs + 1) * (before[::-1] == token_id)
        if self._end == len(recent):
            recent[:most] = recent[most:]
            self._end = most
        recent[self._end] = token_id
        self._end += 1
        return bool((self._runs >= self._needed).any())
