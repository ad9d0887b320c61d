"""Rows of encodings in the slots of an arena."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.kv_layout import GroupShape, make_layout
from paceline.engine.encoding_rows import EncodingRows

HIDDEN, SLOTS = 24, 5
LAYOUT = make_layout((GroupShape("full", (0,), 2, 24),), 2, "test", encoding_size=HIDDEN)
"""A block of an encoding has 80 rows, and 256 bytes of its slot are padding."""


def arena() -> torch.Tensor:
    return torch.full((SLOTS * LAYOUT.slot_bytes // 2,), torch.nan, dtype=torch.bfloat16)


@given(st.permutations(range(SLOTS)), st.integers(1, 160), st.data())
def test_rows_are_read_as_they_were_written(order: list[int], length: int, data: st.DataObject) -> None:
    memory = arena()
    stored = EncodingRows(LAYOUT, memory)
    assert stored.block_tokens == 80
    slots = order[: -(-length // 80)]
    rows = torch.randn(length, HIDDEN, dtype=torch.bfloat16)
    stored.write(slots, 0, rows)
    start = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(start + 1, length))
    assert torch.equal(stored.read(slots, start, end), rows[start:end])
    assert not stored.read(slots, length, len(slots) * 80).any()  # filled up with zeros
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert memory.view(SLOTS, -1)[others].isnan().all()


def test_published_blocks_are_not_written_again() -> None:
    stored = EncodingRows(LAYOUT, arena())
    stored.write([3, 1], 0, torch.ones(100, HIDDEN))
    stored.write([3, 1], 1, torch.zeros(100, HIDDEN))
    assert stored.read([3, 1], 0, 80).eq(1).all()
    assert stored.read([3, 1], 80, 100).eq(0).all()


def test_rows_of_another_size_are_refused() -> None:
    stored = EncodingRows(LAYOUT, arena())
    with pytest.raises(ValueError, match=r"\[100, 24\]"):
        stored.write([3, 1], 0, torch.ones(100, 1))
    with pytest.raises(ValueError, match=r"2 blocks"):
        stored.write([3, 1], 0, torch.ones(161, HIDDEN))
