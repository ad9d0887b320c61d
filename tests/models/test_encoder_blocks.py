from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.models.encoders.blocks import pool
from paceline.models.encoders.local_attention import attend_locally


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
