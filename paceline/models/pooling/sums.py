"""Pooling of hidden states that come in chunks: what is carried from one chunk to the next.

Sums are added up in fp64, token by token in order of position. So the places at which an input was cut change no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class _First:
    def __init__(self) -> None:
        self._row: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        if self._row is None:
            self._row = rows[0].clone()

    def result(self) -> Tensor:
        assert self._row is not None
        return self._row


class _Last:
    def add(self, rows: Tensor) -> None:
        self._row = rows[-1].clone()

    def result(self) -> Tensor:
        return self._row


class _Most:
    def __init__(self) -> None:
        self._most: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        most = rows.amax(0)
        self._most = most if self._most is None else torch.maximum(self._most, most)

    def result(self) -> Tensor:
        assert self._most is not None
        return self._most


class _Sum:
    """A weighted sum of rows, divided at the end.

    Args:
        weighs: whether the weights are 1, 2, 3, ...; otherwise all are 1.
        power: the sum is divided by the sum of the weights to this power.
    """

    def __init__(self, weighs: bool = False, power: float = 1.0) -> None:
        self._weighs = weighs
        self._power = power
        self._count = 0
        self._sum: np.ndarray | float = 0.0

    def add(self, rows: Tensor) -> None:
        for row in rows.double().numpy():  # one after another, because other sums have no fixed order
            self._count += 1
            self._sum = self._sum + (row * self._count if self._weighs else row)

    def result(self) -> Tensor:
        weights = self._count * (self._count + 1) / 2 if self._weighs else self._count
        return torch.from_numpy(np.asarray(self._sum / weights**self._power, dtype=np.float32))


_REDUCTIONS: Mapping[Pooling, Callable[[], Reduction]] = {
    "cls": _First,
    "last": _Last,
    "max": _Most,
    "mean": _Sum,
    "mean_sqrt_len": lambda: _Sum(power=0.5),
    "weightedmean": lambda: _Sum(weighs=True),
}


def reduction(pooling: Pooling) -> Reduction:
    """Return what makes one vector of the hidden states of an input."""
    return _REDUCTIONS[pooling]()
