"""The products of low-rank adapters, one row of the batch in each program."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton_kernels.device.arithmetic import rounded


@triton.jit
def shrink(
    sums,
    x,
    slots,
    rows,
    x_stride,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    SIZE_IN: tl.constexpr,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute sums[row] = scale * down x[row], fp32 [rows, RANKS], for rows whose adapter has a part for this layer.

    Grid: (rows). RANKS is a power of two, at least the largest rank.

    Args:
        slots: int64 [slots, FIELDS], see `AdaptedLayer`.
        rows: int64: the slot of each row, negative for none.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    if slot >= 0:
        fields = slots + slot * FIELDS
        down, count = tl.load(fields).to(tl.pointer_type(DTYPE)), tl.load(fields + 4)
        scale = tl.load(fields + 5).to(tl.int32).to(tl.float32, bitcast=True)
        rank, step = tl.arange(0, RANKS), tl.arange(0, STEP)
        acc = tl.zeros([RANKS], tl.float32)
        for first in range(0, SIZE_IN, STEP):
            inside = step < SIZE_IN - first
            values = tl.load(x + row * x_stride + first + step, inside, 0.0).to(tl.float32)
            places = down + rank[:, None] * SIZE_IN + first + step[None, :]
            weights = tl.load(places, (rank < count)[:, None] & inside[None, :], 0.0).to(tl.float32)
            acc += tl.sum(weights * values[None, :], 1)
        tl.store(sums + row * RANKS + rank, acc * scale)


@triton.jit
def expand(
    y,
    sums,
    slots,
    rows,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute y[row] = factors * y[row] + up sums[row] + scale * bias, with the arguments of `shrink`.

    Grid: (rows, SIZE_OUT / BLOCK).
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    if slot >= 0:
        fields = slots + slot * FIELDS
        up, count = tl.load(fields + 1).to(tl.pointer_type(DTYPE)), tl.load(fields + 4)
        bias, factors = tl.load(fields + 2), tl.load(fields + 3)
        scale = tl.load(fields + 5).to(tl.int32).to(tl.float32, bitcast=True)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside, rank = column < SIZE_OUT, tl.arange(0, RANKS)
        own = tl.load(sums + row * RANKS + rank, rank < count, 0.0)
        places = up + rank[:, None] * SIZE_OUT + column[None, :]
        weights = tl.load(places, (rank < count)[:, None] & inside[None, :], 0.0).to(tl.float32)
        added = tl.sum(weights * own[:, None], 0)
        has_bias = inside & (bias != 0)
        added += scale * tl.load(bias.to(tl.pointer_type(DTYPE)) + column, has_bias, 0.0).to(tl.float32)
        place = y + row * SIZE_OUT + column
        has_factors = inside & (factors != 0)
        factor = tl.load(factors.to(tl.pointer_type(tl.float32)) + column, has_factors, 1.0)
        total = tl.load(place, inside, 0.0).to(tl.float32) * factor + added
        tl.store(place, rounded(total, y.dtype.element_ty), inside & (count > 0))
