"""The order of tokens by expert, their products with the weights of their experts, and the weighted sum of results."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton_kernels.device.arithmetic import dot, rounded


@triton.jit(do_not_specialize=["pairs"])
def sort_pairs(
    order,
    starts,
    tile_ends,
    ids,
    pairs,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sort pairs of a token and one of its experts by expert. Grid: (experts); each program places its expert's pairs.

    Args:
        order, starts, tile_ends: results, which are the arguments of `expert_products`.
        ids: int64 [pairs]: the expert of each pair.
        BINS: a power of two above EXPERTS.
        ROWS: number of rows of a tile.
        BLOCK: number of pairs that are read at a time.
    """
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(ids + pair, pair < pairs, EXPERTS).to(tl.int32), BINS)
    place = tl.sum(tl.where(bins < expert, counts, 0), 0)
    tl.store(starts + expert, place)  # the program of the expert before it writes the same number
    tl.store(starts + expert + 1, place + tl.sum(tl.where(bins == expert, counts, 0), 0))
    tl.store(tile_ends + expert, tl.sum(tl.where(bins <= expert, (counts + ROWS - 1) // ROWS, 0), 0))
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        is_chosen = (tl.load(ids + pair, pair < pairs, EXPERTS) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_chosen, 0) - 1, pair, is_chosen != 0)
        place += tl.sum(is_chosen, 0)


@triton.jit
def expert_products(
    out,
    x,
    table,
    order,
    starts,
    tile_ends,
    x_stride,
    pairs,
    FIRST: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    PAIRS_OF_ROW: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute out[m, p] = x[p / PAIRS_OF_ROW] @ W.T + b for each pair p of a token and an expert, in equal tiles.

    W [SIZE_OUT, SIZE_IN] and b are matrix and bias m of the pair's expert, dense, at the addresses table[FIRST + m, e]
    and table[FIRST + m + 3, e]. Grid: (most tiles, tiles of columns, matrices).

    Args:
        out: [matrices, pairs, SIZE_OUT].
        order: int32, the pairs, sorted by expert.
        starts: int32 [EXPERTS + 1]: pairs order[starts[e]:starts[e + 1]] have expert e.
        tile_ends: int32 [EXPERTS]: number of tiles of all experts up to e.
    """
    tile, matrix = tl.program_id(0), tl.program_id(2)
    experts = tl.arange(0, PADDED_EXPERTS)
    ends = tl.load(tile_ends + experts, experts < EXPERTS, 2**31 - 1)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert < EXPERTS:
        first_tile = tl.load(tile_ends + expert - 1, expert > 0, 0)
        row = tl.load(starts + expert) + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
        inside_rows = row < tl.load(starts + expert + 1)
        pair = tl.load(order + row, inside_rows, 0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside_columns = column < SIZE_OUT
        step = tl.arange(0, STEP)
        dtype = out.dtype.element_ty
        weight = tl.load(table + (FIRST + matrix) * EXPERTS + expert).to(tl.pointer_type(dtype))
        # The address is a multiple of 16 bytes. Without this hint, elements are loaded one at a time.
        weight = tl.multiple_of(weight, 16)
        x_tile = x + (pair // PAIRS_OF_ROW)[:, None] * x_stride + step[None, :]
        weight_tile = weight + column.to(tl.int64)[None, :] * SIZE_IN + step[:, None]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, SIZE_IN, STEP):
            inside = step < SIZE_IN - first
            left = tl.load(x_tile + first, inside_rows[:, None] & inside[None, :], 0.0)
            right = tl.load(weight_tile + first, inside_columns[None, :] & inside[:, None], 0.0)
            acc = dot(left, right, acc, INTERPRETED)
        if BIAS:
            bias = tl.load(table + (FIRST + matrix + 3) * EXPERTS + expert).to(tl.pointer_type(dtype))
            acc += tl.load(bias + column, inside_columns, 0.0).to(tl.float32)[None, :]
        place = out + (matrix.to(tl.int64) * pairs + pair)[:, None] * SIZE_OUT + column[None, :]
        tl.store(place, rounded(acc, dtype), inside_rows[:, None] & inside_columns[None, :])


@triton.jit
def weighted_sum(out, parts, weights, SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out[t] = sum of weights[t, k] * parts[t, k] in the order of k. All are contiguous, weights are fp32.

    Grid: (tokens, SIZE / BLOCK).
    """
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(TOP_K):
        part = tl.load(parts + (token * TOP_K + place) * SIZE + dim, dim < SIZE, 0.0).to(tl.float32)
        total += tl.load(weights + token * TOP_K + place) * part
    tl.store(out + token * SIZE + dim, rounded(total, out.dtype.element_ty), dim < SIZE)
