"""Division of an encoder's work, so that no part of it takes long, however large an image is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.kernels.encoding import Between

PIECE_ROWS = 256
"""Largest number of rows of a piece on a CPU. The products of matrices with more rows would take longer than a step of
decode, which runs on the same cores."""
PIECE_PAIRS = 1 << 20
"""Largest number of pairs of a query and a key in a piece. It makes pieces smaller for images of more than 4,096
patches.
"""
_LEAST_ROWS = 16


class Pieces:
    """Runs an encoder's operations on some rows at a time.

    Other work can have the thread and the cores between two pieces. Without this, one layer of a large image could take
    a minute, and the worker would seem to hang. On a GPU no thread waits for the end of a piece, so all rows are one
    piece.

    Args:
        between: called before each piece.
        device: device that computes.
    """

    def __init__(self, between: Between, device: torch.device) -> None:
        self._between = between
        self._divides = device.type == "cpu"

    def of(self, compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, keys: int = 0) -> tuple[Tensor, ...]:
        """Return compute(*inputs), computed piece by piece. Each of its rows may depend only on the same row of the
        inputs.

        Args:
            inputs: [rows, ...] each.
            keys: number of keys to which each row attends.
        """
        rows = len(inputs[0])
        most = max(_LEAST_ROWS, min(PIECE_ROWS, PIECE_PAIRS // max(1, keys))) if self._divides else rows
        results = []
        for start in range(0, rows, most):
            self._between()
            results.append(compute(*(rows[start : start + most] for rows in inputs)))
        return results[0] if len(results) == 1 else tuple(torch.cat(parts) for parts in zip(*results))
