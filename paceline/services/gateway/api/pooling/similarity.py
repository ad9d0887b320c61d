"""How well two results of pooling fit together: the cosine of two vectors, and MaxSim of two lists of vectors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_PRODUCTS = 1 << 24
"""Largest number of products of vectors that are in memory at once: 64 MiB."""


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the cosine of the angle between two vectors [dim]; 0 if one of them is zero.

    It depends on the two vectors alone, and not on others in the request. Sums are in double precision.
    """
    first, second = one.astype(np.float64), other.astype(np.float64)
    length = np.sqrt(first @ first) * np.sqrt(second @ second)
    return float(np.clip(first @ second / length, -1.0, 1.0)) if length else 0.0


def max_sim(query: NDArray[np.float32], document: NDArray[np.float32]) -> float:
    """Return the sum over the vectors of a query of their largest product with a vector of a document.

    Args:
        query: vectors [rows, dim], which usually have the length 1.
        document: vectors [rows, dim]. A document without vectors has the score 0.
    """
    if not len(document):
        return 0.0
    step = max(1, MOST_PRODUCTS // max(1, len(query)))
    best = np.full(len(query), -np.inf, np.float32)
    for begin in range(0, len(document), step):
        best = np.maximum(best, (query @ document[begin : begin + step].T).max(axis=1))
    return float(best.sum(dtype=np.float64))
