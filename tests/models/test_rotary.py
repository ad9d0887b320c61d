from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.kernels.interface import Kernels
from paceline.kernels.native import NativeKernels
from paceline.kernels.reference import ReferenceKernels
from paceline.models.config.fields import read_rope
from paceline.models.model_config import Rope
from paceline.models.rotary import Rotary, inverse_frequencies, rotary_order
from tests.models.configs import QWEN3_VL, read


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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
        {"factor": None, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"attention_factor": 1.25, "beta_slow": 3.0},
        {"factor": 1.0, "rope_theta": 150_000.0},
        {"original_max_position_embeddings": 3},
    ],
)
def test_yarn_is_that_of_transformers_bit_for_bit(changes: dict[str, Any]) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 32.0, "original_max_position_embeddings": 4096}
    parameters |= changes
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=65_536, rope_parameters=parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = read_rope(parameters, 10_000.0, 65_536)
    assert torch.equal(inverse_frequencies(rope, 64), frequencies)
    assert rope.attention_factor == factor


@pytest.mark.parametrize("kernels", [NativeKernels(2), ReferenceKernels()], ids=["native", "reference"])
def test_three_equal_positions_have_the_bits_of_one(tmp_path: Path, kernels: Kernels) -> None:
    rotary = Rotary(read(tmp_path, QWEN3_VL), torch.device("cpu"), kernels)
    positions = torch.tensor([0, 5, 7, 100_000])
    grids = positions.repeat(3, 1)
    grids[1:, 2] = torch.tensor([90, 3])
    found, text = rotary.of_grids(grids), rotary(positions)["full"]
    rows, columns = (rotary(own)["full"] for own in grids[1:])
    others = [0, 1, 3]
    for own, one, row, column in zip(*((each.cos, each.sin) for each in (found, text, rows, columns))):
        assert torch.equal(own[others], one[others])
        assert torch.equal(own[2, 0:60:3], one[2, 0:60:3])
        assert torch.equal(own[2, 1:60:3], row[2, 1:60:3])
        assert torch.equal(own[2, 2:60:3], column[2, 2:60:3])
        assert torch.equal(own[2, 60:64], one[2, 60:64])
        assert torch.equal(own[:, :64], own[:, 64:])


def test_a_proportional_embedding_turns_the_first_pairs_of_both_halves() -> None:
    rope = Rope(100.0, "proportional", factor=2.0, rotated_dims=6)
    assert rotary_order(rope, 1, 16) is None
    expected = [100.0 ** (-2 * pair / 16) / 2.0 if pair < 3 else 0.0 for pair in range(8)]
    torch.testing.assert_close(inverse_frequencies(rope, 16), torch.tensor(expected))


def _rotate_by_pairs(heads: torch.Tensor, positions: torch.Tensor, rotated: int, interleaved: bool) -> torch.Tensor:
    out = heads.clone()
    for pair in range(rotated // 2):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotated // 2)
        angle = (positions * 100.0 ** (-2 * pair / rotated)).unsqueeze(1)
        out[..., a] = heads[..., a] * angle.cos() - heads[..., b] * angle.sin()
        out[..., b] = heads[..., b] * angle.cos() + heads[..., a] * angle.sin()
    return out
