"""Counts of the tokens in a context, for penalties."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class TokenCounts:
    """The number of times that each token is in a context. The whole context is counted once; later only changes are
    counted.

    Counting a context of 131,072 tokens again for each new token would take 50 ms, during which all rows of a step
    wait.

    Args:
        context: the context so far: integers [tokens].
        prompt_len: number of tokens of the prompt. The tokens after the prompt are the output.
    """

    def __init__(self, context: np.ndarray, prompt_len: int) -> None:
        ids, times = np.unique(context, return_counts=True)
        output, output_times = np.unique(context[prompt_len:], return_counts=True)
        # int64 [3, columns], a column for each token: its id, and how often it is in the context and in the output.
        self._table = np.zeros((3, len(ids)), dtype=np.int64)
        self._table[:2] = ids, times
        self._table[2, np.searchsorted(ids, output)] = output_times
        self._sorted = len(ids)
        """Number of the columns that are sorted by id: those of the first tokens."""
        self._used = len(ids)
        self._later: dict[int, int] = {}
        """The columns of all other tokens."""
        self._prompt_len = prompt_len
        self._settled = len(context)
        self._drafts: list[int] = []
        """The counted tokens after the settled tokens."""

    def follow(self, token_ids: np.ndarray, settled: int, length: int) -> None:
        """Update the counts to a context that has grown, or whose drafts have changed.

        Args:
            token_ids: integers [tokens], which begin with the context.
            settled: number of tokens that will not change. It never decreases. The tokens after them are drafts.
            length: number of tokens of the context, at least `settled`.
        """
        for place, token in enumerate(self._drafts, self._settled):
            self._add(token, place, -1)
        for place, token in enumerate(token_ids[self._settled : length].tolist(), self._settled):
            self._add(token, place, 1)
        self._drafts = token_ids[settled:length].tolist()
        self._settled = settled

    @property
    def context(self) -> Tensor:
        """The distinct tokens of the context: int64 [tokens]."""
        ids, times, _ = self._table[:, : self._used]
        return torch.from_numpy(ids[times > 0])

    @property
    def output(self) -> tuple[Tensor, Tensor]:
        """The distinct tokens of the output, and the number of times that each occurs in it: both int64 [tokens]."""
        ids, _, times = self._table[:, : self._used]
        is_there = times > 0
        return torch.from_numpy(ids[is_there]), torch.from_numpy(times[is_there])

    def _add(self, token: int, place: int, count: int) -> None:
        column = self._column(token)
        self._table[1, column] += count
        if place >= self._prompt_len:
            self._table[2, column] += count

    def _column(self, token: int) -> int:
        """Return the column of a token, which is a new one if the token has none."""
        known = self._table[0, : self._sorted]
        column = int(np.searchsorted(known, token))
        if column < len(known) and known[column] == token:
            return column
        column = self._later.setdefault(token, self._used)
        if column == self._table.shape[1]:
            self._table = np.pad(self._table, ((0, 0), (0, column + 16)))
        if column == self._used:
            self._table[0, column] = token
            self._used += 1
        return column
