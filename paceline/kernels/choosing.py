"""The interface to code that chooses tokens on the device that holds the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling parameters of a token that depends only on these parameters and its row of logits. Their meaning is that
    of `SamplingParams`.
    """

    temperature: float
    """Divisor of the logits; 0 chooses the token with the largest logit."""
    top_k: int
    min_p: float
    top_p: float
    seed: int
    position: int
    """Position of the token to choose. The random number depends on the seed and this position only."""


class TokenChooser(Protocol):
    """Chooses tokens on the device of the logits, for many rows in one call, exactly as the host's sampler would."""

    def choose(self, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> Tensor:
        """Choose a token for each row of `logits`, fp32 [n, vocab], that `rows` names. Return int64 [rows]."""

    def accept(self, tokens: Tensor, drafts: Tensor, first_rows: Sequence[int]) -> Tensor:
        """Verify drafts strictly: accept a draft if it and all drafts before it equal the chosen tokens.

        Args:
            tokens: int64 [rows]: the token chosen for each row.
            drafts: int64 [rows]: the input token of each row. The first row of a request is not a draft.
            first_rows: [requests + 1]: rows [first_rows[r], first_rows[r + 1]) belong to request r.

        Returns:
            int64 [requests, width]: the accepted drafts, the token chosen after them, then -1.
        """
