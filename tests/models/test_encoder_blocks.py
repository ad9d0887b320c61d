from __future__ import annotations

import math
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.models.encoders import pieces
from paceline.models.encoders.blocks import pool
from paceline.models.encoders.local_attention import attend_locally
from paceline.models.encoders.pieces import Pieces


@given(rows=st.integers(1, 30), window=st.integers(1, 7), heads=st.integers(1, 3))
def test_local_attention_is_attention_with_a_mask(rows: int, window: int, heads: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    queries, keys, values = torch.randn(3, rows, heads, 4, generator=generator)
    distances = torch.randn(window, heads, 4, generator=generator)
    row = torch.arange(rows)
    distance = row.unsqueeze(1) - row
    seen = (distance >= 0) & (distance < window)
    by_key = keys + distances[distance.clamp(0, window - 1)]  # [query, key, heads, 4]
    scores = 5.0 * torch.tanh(torch.einsum("qhd,qkhd->hqk", queries, by_key) / 5.0)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, values)
    torch.testing.assert_close(attend_locally(queries, keys, values, distances, 5.0), expected)


def test_pooling_means_squares() -> None:
    x = torch.arange(24.0).view(24, 1).expand(-1, 2)  # four rows of six patches
    assert pool(x, 6, 2)[:, 1].tolist() == [3.5, 5.5, 7.5, 15.5, 17.5, 19.5]


@given(rows=st.integers(1, 40), most=st.integers(1, 50), pairs=st.integers(1, 2_000), keys=st.integers(0, 100))
def test_pieces_have_all_rows_once_and_bounded_work(rows: int, most: int, pairs: int, keys: int) -> None:
    between = mock.Mock()
    numbers, sizes = torch.arange(rows), list[int]()

    def compute(own: torch.Tensor, same: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert torch.equal(own, same)
        assert between.call_count == len(sizes) + 1
        sizes.append(len(own))
        return own + 1, own * 2

    with mock.patch.multiple(pieces, PIECE_ROWS=most, PIECE_PAIRS=pairs, _LEAST_ROWS=1):
        found, doubled = Pieces(between, torch.device("cpu")).of(compute, numbers, numbers, keys=keys)
        (whole,) = Pieces(between, torch.device("cuda")).of(lambda own: (own,), numbers)
    assert torch.equal(found, numbers + 1)
    assert torch.equal(doubled, numbers * 2)
    assert max(sizes) <= most
    assert max(sizes) * keys <= max(pairs, keys)
    assert torch.equal(whole, numbers)
    assert between.call_count == len(sizes) + 1
