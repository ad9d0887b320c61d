"""Guessing the next tokens, so that one forward pass can verify several."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Drafter(Protocol):
    """Proposes what may come next. A wrong guess costs time, never a token."""

    def propose(self, context: np.ndarray) -> list[int]:
        """Token ids that may follow int32 [tokens]; none where there is no idea."""


class PromptLookup:
    """What followed the last time that the context ended like this (n-gram, prompt lookup).

    Args:
        count: tokens to propose at most.
        min_tokens, max_tokens: how much of the end must agree, and how much is looked at to choose the best place.
    """

    def __init__(self, count: int, min_tokens: int, max_tokens: int) -> None:
        self._count = count
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens

    def propose(self, context: np.ndarray) -> list[int]:
        last = len(context) - 1
        # Places before the end where the last token stands, narrowed to those where more and more of the end agrees.
        places = np.flatnonzero(context[:last] == context[last])
        for agreed in range(1, self._max_tokens):
            longer = places[(places >= agreed) & (context[places - agreed] == context[last - agreed])]
            if len(longer) == 0:
                if agreed < self._min_tokens:
                    return []
                break
            places = longer
        if len(places) == 0:
            return []
        begin = int(places[-1]) + 1
        return context[begin : begin + self._count].tolist()
