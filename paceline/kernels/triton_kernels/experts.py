"""The launch of the kernels of layers with experts. Nothing here waits for the device, so that graphs can record it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from paceline.kernels.experts import ExpertWeights
from paceline.kernels.packed_weight import PackedWeight
from paceline.kernels.triton_kernels.device import INTERPRETED
from paceline.kernels.triton_kernels.device import experts as device

_ROWS, _COLUMNS, _SUM_BLOCK = 64, 64, 1024
"""Rows and columns of a tile of products, and elements of a block of the sum. They are constant, so that a row has the
same bits in any batch.
"""
_SORT_BLOCK = 1024
"""Number of pairs of a token and an expert that the sorting kernel reads at a time."""


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs of a token and one of its experts, sorted by expert, on the device, as `device.expert_products` reads
    them.
    """

    order: Tensor
    starts: Tensor
    tile_ends: Tensor
    most_tiles: int
    """Upper bound of the number of tiles. It depends on the number of pairs only, so the host knows it."""


def index_experts(experts: ExpertWeights) -> ExpertWeights:
    """Return the weights as dense matrices, with a table of their addresses and those of biases: int64 [6, experts]."""
    gate, up, down = (tuple(map(_dense, matrices)) for matrices in (experts.gate, experts.up, experts.down))
    if any(weight.data.is_meta for matrices in (gate, up, down) for weight in matrices):
        return experts  # a missing tensor, which the loader reports
    rows = [[weight.data.data_ptr() for weight in matrices] for matrices in (gate, up, down)]
    given = experts.gate_bias, experts.up_bias, experts.down_bias
    gate_bias, up_bias, down_bias = biases = [None if bias is None else bias.contiguous() for bias in given]
    rows += [[0] * len(gate) if bias is None else [expert_bias.data_ptr() for expert_bias in bias] for bias in biases]
    table = torch.tensor(rows, dtype=torch.int64, device=gate[0].data.device)
    return ExpertWeights(gate, up, down, experts.activation, gate_bias, up_bias, down_bias, table)


def _dense(weight: PackedWeight) -> PackedWeight:
    """Return a weight whose matrix is dense and begins at a multiple of 16 bytes, as the kernel expects."""
    data = weight.data.contiguous()
    return replace(weight, data=data if data.is_meta or data.data_ptr() % 16 == 0 else data.clone())


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert_weights: ExpertWeights, activate: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Compute `ExpertKernels.experts`, where `activate` computes act(gate, up)."""
    (tokens, hidden), top_k = x.shape, ids.shape[1]
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    pairs = sort_pairs(ids, len(expert_weights.gate))
    x = x if x.stride(1) == 1 else x.contiguous()
    gate, up = products(x, pairs, expert_weights, first=0, matrices=2, pairs_of_row=top_k)
    (parts,) = products(activate(gate, up), pairs, expert_weights, first=2, matrices=1, pairs_of_row=1)
    device.weighted_sum[tokens, triton.cdiv(hidden, _SUM_BLOCK)](
        out, parts, weights.contiguous(), SIZE=hidden, TOP_K=top_k, BLOCK=_SUM_BLOCK
    )
    return out


def sort_pairs(ids: Tensor, experts: int) -> SortedPairs:
    """Sort the pairs of a token and one of its experts by expert. `ids` is int64 [tokens, top_k]."""
    pairs = ids.numel()
    order, starts, tile_ends = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in (pairs, experts + 1, experts)
    )
    bins = triton.next_power_of_2(experts + 1)
    device.sort_pairs[experts,](
        order, starts, tile_ends, ids.contiguous(), pairs, EXPERTS=experts, BINS=bins, ROWS=_ROWS, BLOCK=_SORT_BLOCK
    )
    return SortedPairs(order, starts, tile_ends, pairs // _ROWS + min(experts, pairs))


def products(
    x: Tensor, pairs: SortedPairs, expert_weights: ExpertWeights, first: int, matrices: int, pairs_of_row: int
) -> Tensor:
    """Return the products of each pair's row of x with its expert's matrices: [matrices, pairs, outputs].

    Args:
        first: the first of the matrices: 0 is gate, 1 is up, 2 is down.
        pairs_of_row: number of consecutive pairs that have the same row of x.
    """
    weight, count = (expert_weights.gate if first == 0 else expert_weights.down)[0], len(pairs.order)
    out = torch.empty(matrices, count, weight.size_out, dtype=x.dtype, device=x.device)
    device.expert_products[pairs.most_tiles, triton.cdiv(weight.size_out, _COLUMNS), matrices](
        out,
        x,
        expert_weights.table,
        pairs.order,
        pairs.starts,
        pairs.tile_ends,
        x.stride(0),
        count,
        FIRST=first,
        EXPERTS=len(expert_weights.gate),
        PADDED_EXPERTS=triton.next_power_of_2(len(expert_weights.gate)),
        PAIRS_OF_ROW=pairs_of_row,
        SIZE_IN=weight.size_in,
        SIZE_OUT=weight.size_out,
        BIAS=expert_weights.gate_bias is not None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        STEP=128 // x.itemsize,
        INTERPRETED=INTERPRETED,
        num_stages=4,
    )
    return out
