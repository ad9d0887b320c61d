"""The order in which Triton's kernels take pairs of a token and an expert, and where they expect weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from paceline.kernels import select_kernels
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.triton_kernels.experts import sort_pairs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (5, 3, 8), (700, 2, 12), (300, 8, 100)])
def test_pairs_are_sorted_by_expert_in_their_order(tokens: int, top_k: int, experts: int) -> None:
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens), device="cpu").to(DEVICE)
    ids = ids.topk(top_k).indices // 2 if experts > 1 else torch.zeros(tokens, 1, dtype=torch.int64, device=DEVICE)
    pairs = sort_pairs(ids, experts)
    counts = torch.bincount(ids.flatten(), minlength=experts)
    assert pairs.order.tolist() == ids.flatten().argsort(stable=True).tolist()
    assert pairs.starts.tolist() == [0, *counts.cumsum(0).tolist()]
    assert pairs.tile_ends.tolist() == (-(-counts // 64)).cumsum(0).tolist()
    assert pairs.tile_ends[-1] <= pairs.most_tiles


def test_experts_anywhere_in_memory_begin_at_wide_addresses() -> None:
    whole = torch.randn(3 * 5 * 7 + 1, device=DEVICE)[1:].view(3, 5, 7)
    kernels = select_kernels(DEVICE, "triton")
    gate, down = [kernels.pack(own) for own in whole], [kernels.pack(own.T) for own in whole]
    indexed = kernels.index_experts(ExpertWeights(gate, gate, down, "silu"))
    assert indexed.table is not None
    assert (indexed.table[:3] % 16).count_nonzero() == 0
    for own, weight in zip(whole, indexed.gate):
        assert torch.equal(weight.data, own)
