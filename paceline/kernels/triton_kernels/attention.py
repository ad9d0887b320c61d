"""The launch of the attention kernels, and the cutting of a step's queries into tiles for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache
from paceline.kernels.transfer import to_device
from paceline.kernels.triton_kernels.device import INTERPRETED
from paceline.kernels.triton_kernels.device import attention as device
from paceline.kernels.triton_kernels.rowwise import cache_strides

_ROWS = 64
"""Number of rows of each tile. Another number could select another matrix instruction, which adds in another order. In
decode, more than half of the rows are empty, but they cost little, because the bandwidth of the KV cache is the limit.
"""
_ROW_ELEMENTS = 16384
"""Largest number of elements of the sums of a tile's rows. There are two such sums, in fp32, and both fit in
registers."""
SPLIT = 256
"""Number of keys of a split. It does not depend on the batch, so the bits of a row do not depend on the batch
either.
"""
_TILE_BYTES = 16384
"""Largest size of a tile of keys, in bytes. Two tiles of keys and two tiles of values are in flight besides the
queries.
"""
_KEY_BYTES = 128
"""Largest number of bytes that the same element of all keys of a tile takes."""


@dataclass(frozen=True, slots=True)
class StaticBatch(AttentionBatch):
    """A batch whose numbers change on the device while their place in memory stays the same.

    Lengths on the host describe the largest batch that fits: the largest number of requests, each with the largest
    numbers of queries and of context tokens.
    """

    own_query_start: Tensor
    """int32 [requests + 1]: `query_start` of the present batch, on the device."""
    own_context_len: Tensor
    """int32 [requests]: `context_len` of the present batch, on the device; 0 for a place without a request."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The description of a batch that the kernels read. All tensors are on the device, int32 unless said otherwise."""

    group: int
    """Number of query heads that share a KV head."""
    tile_rows: int
    """Number of rows of each tile, from the function `tile_rows`."""
    query_start: Tensor
    context_len: Tensor
    last_keys: Tensor | None
    """int64 [tokens]: `AttentionBatch.last_keys`."""
    whole: Tensor
    """[tiles, 3]: tiles for which one program reads all visible keys. `device.attention` describes the columns."""
    apart: Tensor
    """[tiles, 3]: tiles for which every split has a program of its own."""
    rows: int
    """Number of rows of all tiles in `apart`."""
    most_rows: int
    """Largest number of rows of one tile in `apart`."""
    splits: int
    """Largest number of splits of one request in `apart`."""


def tile_rows(head_dim: int) -> int:
    """Return the number of rows of each tile. It depends only on the size of a head, so that bits do not depend on the
    batch.
    """
    return min(_ROWS, _ROW_ELEMENTS // _padded(head_dim))


def make_plan(batch: AttentionBatch, group: int, tile_rows: int, device: torch.device) -> AttentionPlan:
    """Return the plan of a batch in which `group` query heads share a KV head.

    If a request has one query, or all its queries fit in one tile, and its context does not fit in one split, each
    split has a program of its own. This matters for speed only. A `StaticBatch` may have tiles without queries, which
    do nothing.
    """
    whole: list[int] = []
    apart: list[int] = []
    rows = most_rows = splits = 0
    for request, context in enumerate(batch.context_len):
        query_rows = (batch.query_start[request + 1] - batch.query_start[request]) * group
        if query_rows > max(tile_rows, group) or context <= SPLIT:
            for first in range(0, query_rows, tile_rows):
                whole += (request, first, 0)
        elif query_rows:
            for first in range(0, query_rows, tile_rows):
                apart += (request, first, rows + first)
            rows += query_rows
            most_rows, splits = max(most_rows, min(query_rows, tile_rows)), max(splits, -(-context // SPLIT))
    parts = (batch.query_start, batch.context_len, whole, apart)
    packed = to_device(torch.tensor([number for part in parts for number in part], dtype=torch.int32), device)
    query_start, context_len, whole_tiles, apart_tiles = torch.split(packed, [len(part) for part in parts])
    tiles = whole_tiles.view(-1, 3), apart_tiles.view(-1, 3)
    if isinstance(batch, StaticBatch):
        query_start, context_len = batch.own_query_start, batch.own_context_len
    return AttentionPlan(group, tile_rows, query_start, context_len, batch.last_keys, *tiles, rows, most_rows, splits)


def attention(
    queries: Tensor,
    cache: LayerCache,
    plan: AttentionPlan,
    tables: GroupTables,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    looks_ahead: bool,
    both_sides: bool,
) -> Tensor:
    """Launch the kernels for `Kernels.attention`."""
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    kv_heads, head_dim = cache.keys.shape[1], queries.shape[2]
    shape = {"WINDOW": tables.window, "GROUP": plan.group, "HEAD_DIM": head_dim, "ROWS": plan.tile_rows, "SPLIT": SPLIT}
    shape |= {"DIM": _padded(head_dim), "enable_fp_fusion": False}
    last_keys = plan.last_keys if looks_ahead else None
    shape |= {"SINKS": sinks is not None, "AHEAD": last_keys is not None, "BOTH_SIDES": both_sides}
    itemsize = queries.itemsize  # also of keys, or of the numbers of their codes
    tile = shape | _tile_options(shape["DIM"] * itemsize, itemsize)
    tile["CODE"] = 0 if cache.code is None else int(cache.code)
    tile |= {"CAPPED": softcap != 0, "BLOCK_TOKENS": tables.block_tokens, "INTERPRETED": INTERPRETED}
    # Scores are exponents of 2 instead of e, because the hardware computes powers of 2.
    inner, outer = (scale / softcap, softcap * math.log2(math.e)) if softcap else (scale * math.log2(math.e), 0.0)
    # `out` stands in for what a launch does not use: sinks, last keys, scales, states and accs.
    own_sinks = out if sinks is None else sinks
    bounds = (plan.query_start, plan.context_len, out if last_keys is None else last_keys)
    scales = (out, out) if cache.scales is None else (cache.scales.keys, cache.scales.values)
    sources = (queries, cache.keys, cache.values, *scales, own_sinks, tables.tables, *bounds)
    scalars = (*queries.stride()[:2], tables.tables.stride(0), *cache_strides(cache), inner, outer)
    if len(plan.whole):
        device.attend[len(plan.whole), kv_heads](out, out, out, *sources, plan.whole, 0, *scalars, APART=False, **tile)
    if len(plan.apart):
        splits = plan.splits
        if tables.window and last_keys is None:
            # A window that begins inside a split touches one split more than it could fill.
            splits = min(splits, -(-(tables.window + plan.tile_rows) // SPLIT) + 1)
        states = torch.empty(splits, kv_heads, plan.rows, 2, dtype=torch.float32, device=queries.device)
        accs = torch.empty(splits, kv_heads, plan.rows, head_dim, dtype=torch.float32, device=queries.device)
        device.attend[len(plan.apart), kv_heads, splits](
            out, states, accs, *sources, plan.apart, plan.rows, *scalars, APART=True, **tile
        )
        device.combine[len(plan.apart), kv_heads, plan.most_rows](
            out, states, accs, own_sinks, *bounds, plan.apart, plan.rows, num_warps=1, **shape
        )
    return out


def _padded(head_dim: int) -> int:
    """Return the size of a tile's rows in elements."""
    padded: int = triton.next_power_of_2(head_dim)
    return max(16, padded)


def _tile_options(row_bytes: int, itemsize: int) -> dict[str, int]:
    """Return launch options, which depend on the model only. A tile fits in registers and shared memory from sm_80 on.

    Args:
        row_bytes: size of a padded head.
    """
    keys = max(16, min(_KEY_BYTES // itemsize, _TILE_BYTES // row_bytes))
    return {"KEYS": keys, "num_warps": 8 if row_bytes >= 256 else 4, "num_stages": 2}
