"""Memory for packed weights, on large pages."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 4 * _PAGE
"""Most matrices of a small model are smaller than a page, so they share chunks."""
_CACHE_LINE = 64


class WeightMemory:
    """Places for matrices, one behind the other in the order in which they are asked for, as a pass reads them.

    A chunk is given back when no tensor in it is left. What was not asked for is never written, and so takes no memory.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """uint8 [size], from a multiple of a cache line on."""
        if self._used + size > len(self._chunk):
            chunk = torch.empty(_PAGE + _round_up(max(size, _CHUNK), _PAGE), dtype=torch.uint8)
            self._library.paceline_use_large_pages(chunk.data_ptr(), chunk.nbytes)
            self._chunk, self._used = chunk, -chunk.data_ptr() % _PAGE
        place = self._chunk[self._used : self._used + size]
        self._used += _round_up(size, _CACHE_LINE)
        return place


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
