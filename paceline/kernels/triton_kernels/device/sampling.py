"""The choice of tokens from logits and the check of drafts. Each row has a program, and depends on no other row."""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def best(out, logits, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Write out int64 [rows]: the first index of the largest of fp32 [SIZE]. NaN is the largest. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top, place = tl.full([BLOCK], _LOWEST, tl.int32), tl.full([BLOCK], _HIGHEST, tl.int32)
    for first in range(0, SIZE, BLOCK):
        inside = lane < SIZE - first
        order = tl.where(inside, _order(tl.load(logits + row * row_stride + first + lane, inside, 0.0)), _LOWEST)
        place = tl.where(order > top, first + lane, place)
        top = tl.maximum(top, order)
    largest = tl.max(top, 0)
    tl.store(out + row, tl.min(tl.where(top == largest, place, _HIGHEST), 0).to(tl.int64))


@triton.jit
def _order(x):
    """Map fp32 to int32 of the same order, so that NaN can be compared: it is the largest. -0 equals 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, order)


@triton.jit
def draw(
    out,
    weights,
    seeds,
    positions,
    top_k,
    min_p,
    top_p,
    row_stride,
    PURPOSE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write out int64 [rows]: the index where the cumulative sum of kept weights exceeds the row's random number * sum.

    Three filters decide which weights, fp64 [rows, SIZE], are kept: the first top_k (int64); of these, weights of at
    least min_p (fp64); of these, the shortest prefix whose sum is at least top_p (fp64; inf keeps all) of the sum.
    The largest weight is 1. If top_k or top_p cut, weights must descend. Sums are fp64, block by block. Grid: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    row_weights = weights + row * row_stride
    end, least = tl.load(top_k + row), tl.load(min_p + row)
    mass = tl.zeros([], tl.float64)
    for first in range(0, SIZE, BLOCK):
        mass += tl.sum(_weights(row_weights, first, end, least, SIZE, BLOCK), 0)
    limit = tl.load(top_p + row) * mass
    total, before = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for first in range(0, SIZE, BLOCK):
        weight = _weights(row_weights, first, end, least, SIZE, BLOCK)
        total += tl.sum(_within(weight, before, first, limit, BLOCK), 0)
        before += tl.sum(weight, 0)
    target = _uniform(tl.load(seeds + row), tl.load(positions + row), PURPOSE) * total
    found, last = tl.full([], SIZE, tl.int32), tl.full([], 0, tl.int32)
    below, before = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for first in range(0, SIZE, BLOCK):
        index = first + tl.arange(0, BLOCK)
        weight = _weights(row_weights, first, end, least, SIZE, BLOCK)
        kept = _within(weight, before, first, limit, BLOCK)
        before += tl.sum(weight, 0)
        reached = (below + tl.cumsum(kept, 0) > target) & (index < SIZE)
        found = tl.minimum(found, tl.min(tl.where(reached, index, SIZE), 0))
        below += tl.sum(kept, 0)
        # The random number times the sum may round up to the sum. Then the last kept weight is chosen.
        last = tl.maximum(last, tl.max(tl.where((kept != 0.0) & (index < SIZE), index, 0), 0))
    tl.store(out + row, tl.where(found < SIZE, found, last).to(tl.int64))


@triton.jit
def _weights(row_weights, first, end, least, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return a block of weights, with 0 for weights that top_k or min_p cut."""
    index = first + tl.arange(0, BLOCK)
    weight = tl.load(row_weights + index, (index < SIZE) & (index < end), 0.0)
    return tl.where(weight < least, 0.0, weight)


@triton.jit
def _within(weight, before, first, limit, BLOCK: tl.constexpr):
    """Return a block of weights, with 0 for weights that top_p cuts. `before` sums earlier blocks; index 0 stays."""
    kept = (before + (tl.cumsum(weight, 0) - weight) < limit) | (first + tl.arange(0, BLOCK) == 0)
    return tl.where(kept, weight, 0.0)


@triton.jit
def _uniform(seed, position, PURPOSE: tl.constexpr):
    """Compute `paceline.engine.sampler.uniform`. The int64 arguments have the bits of unsigned numbers."""
    state = seed.to(tl.uint64) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    for _ in range(PURPOSE):
        state += 0xD1B54A32D192ED03
    state = _mixed(_mixed(state))
    return (state >> 11).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def _mixed(state):
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def accept(out, tokens, drafts, first_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Verify drafts. Rows [first_rows[r], first_rows[r + 1]) (int32) belong to request r. Row i chose tokens[i] (int64)
    and had the draft drafts[i + 1] (int64). In the last row of a request nothing was proposed.

    Write out int64 [requests, WIDTH]: the first drafts that equal the chosen tokens, the token chosen after them, then
    -1. A request without rows gets -1 only. Grid: (requests,).
    """
    request = tl.program_id(0)
    first, end = tl.load(first_rows + request), tl.load(first_rows + request + 1)
    index = tl.arange(0, PADDED)
    chosen = tl.load(tokens + first + index, index < end - first, -1)
    draft = tl.load(drafts + first + index + 1, index < end - first - 1, -1)
    refused = tl.where(chosen == draft, PADDED, index)
    # In the last row nothing was proposed.
    count = tl.maximum(tl.minimum(tl.min(refused, 0), end - first - 1), 0)
    place = out + request.to(tl.int64) * WIDTH + index
    tl.store(place, tl.where(index <= count, chosen, -1), index < WIDTH)
