"""Memory for packed weights, on large pages."""

from __future__ import annotations

import ctypes
import threading

import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 4 * _PAGE
"""Bytes of a chunk of memory. Small models have many matrices that are smaller than a large page, so matrices share
chunks.
"""
_CACHE_LINE = 64


class WeightMemory:
    """Memory for matrices, one after another in the order of `take`, which is the order in which a pass reads them.

    Several threads may take memory. A chunk is freed when no tensor in it is left. Bytes of a chunk that were not taken
    are never written, so the system gives no memory for them.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        """Return uint8 [size], aligned to a cache line."""
        with self._lock:
            if self._used + size > len(self._chunk):
                chunk = torch.empty(_PAGE + _round_up(max(size, _CHUNK), _PAGE), dtype=torch.uint8)
                self._library.paceline_use_large_pages(chunk.data_ptr(), chunk.nbytes)
                self._chunk, self._used = chunk, -chunk.data_ptr() % _PAGE
            place = self._chunk[self._used : self._used + size]
            self._used += _round_up(size, _CACHE_LINE)
            return place


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
