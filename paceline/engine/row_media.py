"""Spans of media in the rows of the device's state. A step reads their encodings in place of the tokens' embeddings.

Positions may have three dimensions (M-RoPE, https://arxiv.org/abs/2409.12191). A token of text has three equal
positions. A placeholder token of an image or a frame has the number of its frame, of its row and of its column, each
counted from the position that a token of text would have at the start of the grid. The token after the grid gets the
largest position in the grid plus one. So positions can be computed from the spans alone: the position of a text token
is its index plus a number that changes only after a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.core.media import MediaKind, MediaSpan
from paceline.engine.step import RowAssigned, RowEncoded
from paceline.kernels.transfer import to_device
from paceline.models.base import EncodedRows


def position_shifts(media: Sequence[MediaSpan]) -> list[int]:
    """Return the numbers to add to the index of a text token to get its position: one for the text before each span,
    and one for the text after the last span.

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


class MediaPiece(NamedTuple):
    """Tokens [start, end) of a row. Among the tokens of the step, they begin at index `begin`."""

    row: int
    start: int
    end: int
    begin: int


class EncodingReader(Protocol):
    """A reader of encodings in the slots of the host's arena."""

    def read(self, slots: Sequence[int], start: int, end: int) -> Tensor:
        """Return rows [start, end) of an encoding: [end - start, size] in the model's dtype, on the CPU.

        Args:
            slots: all slots of the encoding, in order.
        """


class RowMedia:
    """The spans in the contexts of up to `count` rows, and their encodings.

    Args:
        whole: kinds of media whose tokens attend to each other. A step computes all tokens of such a span at once.
        encodings: reads encodings from the arena; None if the model reads no encodings.
        device: the device of the model.
    """

    def __init__(
        self, count: int, whole: frozenset[MediaKind], encodings: EncodingReader | None, device: torch.device
    ) -> None:
        self.ends = [0] * count
        """For each row, the end of its last span; 0 if it has none."""
        self.shifts = [0] * count
        """For each row, the number to add to the index of a token after the last span, to get the token's position."""
        self.spans: list[Sequence[MediaSpan]] = [()] * count
        self._span_shifts: list[Sequence[int]] = [()] * count
        self._slots: list[dict[int, Sequence[int]]] = [{} for _ in range(count)]
        self._whole = whole
        self._encodings = encodings
        self._device = device

    def assign(self, update: RowAssigned) -> None:
        """Note the spans of media of the new request in a row."""
        spans = self.spans[update.row] = update.media
        self.ends[update.row] = spans[-1].end if spans else 0
        *self._span_shifts[update.row], self.shifts[update.row] = position_shifts(spans)
        self._slots[update.row] = {}

    def provide(self, update: RowEncoded) -> None:
        """Note the slots of a span's encoding."""
        self._slots[update.row][update.span] = update.slots

    def encoded(self, pieces: Sequence[MediaPiece]) -> EncodedRows | None:
        """Return the rows of encodings that a step with these pieces reads; None if it reads no encodings."""
        places: list[np.ndarray] = []
        rows: list[Tensor] = []
        positions: list[np.ndarray] = []
        for piece in pieces:
            for index, span in enumerate(self.spans[piece.row]):
                start, end = max(piece.start, span.start), min(piece.end, span.end)
                if start < end:
                    assert self._encodings is not None
                    slots = self._slots[piece.row][index]
                    rows.append(self._encodings.read(slots, start - span.start, end - span.start))
                    places.append(np.arange(start, end) + (piece.begin - piece.start))
                    if span.grid is not None:
                        shift = self._span_shifts[piece.row][index]
                        positions.append(grid_positions(span, start, end) + shift)
        if not rows:
            return None
        values = to_device(torch.cat(rows), self._device)
        return EncodedRows(self._joined(places), values, self._joined(positions) if positions else None)

    def shift_positions(self, pieces: Sequence[MediaPiece], positions: np.ndarray) -> None:
        """Turn the indices of tokens in `positions`, int64 [tokens], into their positions.

        Values for placeholder tokens of a grid have no meaning, because their positions are in `EncodedRows.positions`.
        """
        for row, start, end, begin in pieces:
            piece_positions = positions[begin : begin + end - start]
            if start >= self.ends[row]:
                piece_positions += self.shifts[row]
                continue
            shifts = [*self._span_shifts[row], self.shifts[row]]
            for span, before, after in zip(self.spans[row], shifts, shifts[1:]):
                piece_positions[max(span.end - start, 0) :] += after - before

    def _joined(self, arrays: Sequence[np.ndarray]) -> Tensor:
        """Return arrays [..., tokens] of pieces as one tensor on the device."""
        return to_device(torch.from_numpy(np.concatenate(arrays, axis=-1)), self._device)

    def last_keys(self, pieces: Sequence[MediaPiece], positions: np.ndarray) -> Tensor | None:
        """Return `AttentionBatch.last_keys` for the tokens of a step at `positions`; None if no token looks ahead."""
        found: np.ndarray | None = None
        for piece in pieces:
            for span in self.spans[piece.row]:
                start, end = max(piece.start, span.start), min(piece.end, span.end)
                if span.kind not in self._whole or start >= end:
                    continue
                if end < span.end:
                    raise ValueError(f"a step ends at token {end}, within the span [{span.start}, {span.end})")
                found = positions.copy() if found is None else found
                place = piece.begin - piece.start
                found[place + start : place + end] = end - 1
        return None if found is None else to_device(torch.from_numpy(found), self._device)
