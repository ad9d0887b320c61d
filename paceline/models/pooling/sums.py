"""Pooling of hidden states that come in chunks: what is carried from one chunk to the next.

Sums are added up in fp64, token by token in order of position. So the places at which an input was cut change no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.core.pooling_config import Pooling


class Reduction(Protocol):
    """What is known of the tokens so far."""

    def add(self, rows: Tensor) -> None:
        """Take the hidden states of the next tokens, fp32 [tokens, hidden]."""

    def result(self) -> Tensor:
        """Return the vector of all tokens, fp32 [hidden]."""


class _Reduction:
    """Leaves out the first tokens.

    Args:
        skipped: number of tokens at the front that do not take part.
    """

    def __init__(self, skipped: int) -> None:
        self._skipped = skipped
        self._seen = 0
        self._found: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        kept = rows[max(0, self._skipped - self._seen) :]
        self._seen += len(rows)
        if len(kept):
            self._take(kept)

    def result(self) -> Tensor:
        assert self._found is not None, "at least one token takes part"
        return self._found

    def _take(self, rows: Tensor) -> None:
        """Take rows that take part; `_seen` counts them already."""
        raise NotImplementedError


class _First(_Reduction):
    def _take(self, rows: Tensor) -> None:
        if self._found is None:
            self._found = rows[0].clone()


class _Last(_Reduction):
    def _take(self, rows: Tensor) -> None:
        self._found = rows[-1].clone()


class _Most(_Reduction):
    def _take(self, rows: Tensor) -> None:
        most = rows.amax(0)
        self._found = most if self._found is None else torch.maximum(self._found, most)


class _Sum(_Reduction):
    """A weighted sum of rows, divided at the end.

    Args:
        weighs: whether weights are positions, from 1 on; otherwise all are 1.
        power: the sum is divided by the sum of the weights to this power.
    """

    def __init__(self, skipped: int, weighs: bool = False, power: float = 1.0) -> None:
        super().__init__(skipped)
        self._weighs = weighs
        self._power = power
        self._weight = 0
        self._sum: np.ndarray | None = None

    def _take(self, rows: Tensor) -> None:
        numbers = rows.double().cpu().numpy()
        weights = np.arange(self._seen - len(rows) + 1, self._seen + 1) if self._weighs else np.ones(len(rows), int)
        if self._weighs:
            numbers = numbers * weights[:, None]
        self._weight += int(weights.sum())
        if self._sum is not None:
            numbers = np.concatenate((self._sum[None], numbers))
        # Rows are added one after another, because they are not numpy's fast axis. Other sums have no fixed order.
        self._sum = np.add.reduce(numbers, axis=0)

    def result(self) -> Tensor:
        assert self._sum is not None, "at least one token takes part"
        return torch.from_numpy(np.asarray(self._sum / self._weight**self._power, dtype=np.float32))


_REDUCTIONS: Mapping[Pooling, Callable[[int], Reduction]] = {
    "cls": _First,
    "last": _Last,
    "max": _Most,
    "mean": _Sum,
    "mean_sqrt_len": partial(_Sum, power=0.5),
    "weightedmean": partial(_Sum, weighs=True),
}


def reduction(pooling: Pooling, skipped: int = 0) -> Reduction:
    """Return what makes one vector of the hidden states of an input, without its first `skipped` tokens.

    At least one token must take part.
    """
    return _REDUCTIONS[pooling](skipped)
