from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.kernels.reference import ReferenceKernels
from paceline.models.model_config import Rope
from paceline.models.rotary import inverse_frequencies, rotary_order


@given(
    half=st.integers(1, 6),
    rest=st.integers(0, 3),
    interleaved=st.booleans(),
    positions=st.lists(st.integers(0, 200), min_size=1, max_size=4),
)
def test_products_of_reordered_heads_are_those_of_the_checkpoint(
    half: int, rest: int, interleaved: bool, positions: list[int]
) -> None:
    head_dim = 2 * half + 2 * rest
    rope = Rope(100.0, rotated_dims=2 * half if rest else 0, interleaved=interleaved)
    order = rotary_order(rope, 1, head_dim)
    assert (order is None) == (not rest and not interleaved)
    kernels, places = ReferenceKernels(), torch.tensor(positions)
    heads = torch.randn(len(positions), 2, head_dim, generator=torch.Generator().manual_seed(half))
    cos, sin = kernels.rotation(places, inverse_frequencies(rope, head_dim))
    rotated = kernels.rotate(heads if order is None else heads[..., list(order)], cos, sin)
    expected = _rotate_by_pairs(heads, places, 2 * half, interleaved)
    torch.testing.assert_close(rotated[:, 0] @ rotated[:, 1].T, expected[:, 0] @ expected[:, 1].T, rtol=1e-4, atol=1e-4)


def _rotate_by_pairs(heads: torch.Tensor, positions: torch.Tensor, rotated: int, interleaved: bool) -> torch.Tensor:
    out = heads.clone()
    for pair in range(rotated // 2):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotated // 2)
        angle = (positions * 100.0 ** (-2 * pair / rotated)).unsqueeze(1)
        out[..., a] = heads[..., a] * angle.cos() - heads[..., b] * angle.sin()
        out[..., b] = heads[..., b] * angle.cos() + heads[..., a] * angle.sin()
    return out
