"""Positions with three dimensions (M-RoPE, https://arxiv.org/abs/2409.12191). Pure functions.

A token of text has three equal positions. The positions of a placeholder token of an image or a frame are its place in
the grid: the first token of the grid has the position that a token of text would have there, and frames, rows and
columns count up from it. The token after the grid follows the largest position in it. So positions follow from the
spans alone. The position of a token of text is its index plus a number that changes at each grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from paceline.core.media import MediaSpan


def position_shifts(media: Sequence[MediaSpan]) -> list[int]:
    """Return the numbers to add to the index of a text token to get its position: before each span, and after the last
    one.

    Args:
        media: the spans of a context. Tokens of a span without a grid count like text.
    """
    steps = (0 if span.grid is None else max(span.grid) - span.length for span in media)
    return list(accumulate(steps, initial=0))


def grid_positions(span: MediaSpan, start: int, end: int) -> np.ndarray:
    """Return the frame, row and column of tokens [start, end) of a context, which are in a span with a grid, plus the
    index of the span's first token: int64 [3, end - start]."""
    assert span.grid is not None
    return np.stack(np.unravel_index(np.arange(start, end) - span.start, span.grid)) + span.start
