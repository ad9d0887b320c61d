"""Positions with three dimensions are those of `transformers`, wherever a step cuts a context."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from paceline.core.kv_layout import GroupShape, make_layout
from paceline.core.media import MediaKind, MediaSpan
from paceline.core.types import SamplingParams
from paceline.engine.rows import Rows
from paceline.engine.step import RowAssigned, RowEncoded

LAYOUT = make_layout((GroupShape("all", (0,), 1, 16),), 4, "test")
LENGTH = 256
REFERENCE = SimpleNamespace(
    config=Qwen3VLConfig(),
    get_vision_position_ids=lambda *args, **own: Qwen3VLModel.get_vision_position_ids(None, *args, **own),
)
PARTS = st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6), st.sampled_from(list(MediaKind)[:2]))
"""Tokens of text, and then the rows and columns of an image or a frame."""


class NoRows:
    """A reader of encodings without elements."""

    def read(self, slots: Sequence[int], start: int, end: int) -> torch.Tensor:
        return torch.empty(end - start, 0)


def expected(spans: Sequence[MediaSpan], length: int) -> torch.Tensor:
    """Return the positions that `transformers` gives the tokens of a context: [3, length]."""
    types = torch.zeros(1, length, dtype=torch.int64)
    grids: dict[MediaKind, list[tuple[int, int, int]]] = {MediaKind.IMAGE: [], MediaKind.VIDEO_FRAME: []}
    for span in spans:
        assert span.grid is not None
        types[0, span.start : span.end] = 1 + list(grids).index(span.kind)
        grids[span.kind].append((1, 2 * span.grid[1], 2 * span.grid[2]))
    images, frames = (torch.tensor(own) if own else None for own in grids.values())
    found, _ = Qwen3VLModel.get_rope_index(REFERENCE, torch.zeros_like(types), types, images, frames)
    return found[:, 0]


@given(st.lists(PARTS, min_size=1, max_size=4), st.integers(0, 20), st.data())
def test_positions_are_those_of_transformers(
    parts: list[tuple[int, int, int, MediaKind]], rest: int, data: st.DataObject
) -> None:
    spans: list[MediaSpan] = []
    for text, rows, columns, kind in parts:
        start = text + (spans[-1].end if spans else 0)
        spans.append(MediaSpan(start, rows * columns, bytes(16), kind, (1, rows, columns)))
    length = spans[-1].end + rest
    state = Rows(3, LENGTH, 0, LAYOUT, torch.device("cpu"), encodings=NoRows())
    tables = [[0] * LAYOUT.groups[0].blocks_for(LENGTH)]
    for row, media in enumerate([tuple(spans), (), tuple(spans)]):
        state.update([RowAssigned(row, [7] * length, length, 0, SamplingParams(), LENGTH, tables, LENGTH, media)])
        state.update([RowEncoded(row, index, (0,)) for index in range(len(media))])
    cuts = sorted(data.draw(st.tuples(st.integers(0, length - 1), st.integers(0, length - 1))))
    asked = [(0, cuts[0], cuts[1] + 1), (1, 3, 5), (2, length - 1, length)]
    inputs = state.span(asked)
    found = inputs.positions.repeat(3, 1)
    if inputs.encoded is not None:
        assert inputs.encoded.positions is not None
        found[:, inputs.encoded.places] = inputs.encoded.positions
    own = expected(spans, length)
    text = torch.arange(LENGTH).expand(3, -1)
    wanted = [source[:, start:end] for source, (_, start, end) in zip((own, text, own), asked)]
    assert torch.equal(found, torch.cat(wanted, dim=1))
