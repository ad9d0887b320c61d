"""A reader of GGUF files from strangers."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import DTypeLike, NDArray


class CheckedReader(GGUFReader):
    """A reader that refuses what lies after the end of its file.

    The package's own reader takes it for empty. A file of a few bytes that says that a list has 2^60 numbers would keep
    it busy, and fill the memory, for as long as it may run.
    """

    def _get(self, offset: int, dtype: DTypeLike, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        # The package slices its numpy.memmap, which takes seconds for the tokens of a large vocabulary.
        order = self.byte_order if override_order is None else override_order
        size = np.dtype(dtype).itemsize * int(count)
        if offset + size > len(self.data):
            raise ValueError(f"it says that it has {count} values at byte {offset}, and ends before them")
        return np.frombuffer(self.data, np.dtype(dtype).newbyteorder(order), int(count), offset)
