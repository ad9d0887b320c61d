"""A matrix product whose bits do not depend on the number of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton_kernels.device.arithmetic import dot


@triton.jit(do_not_specialize=["tokens"])
def matmul(
    out,
    x,
    weight,
    bias,
    tokens,
    x_stride,
    weight_stride,
    out_stride,
    x_head_stride,
    weight_head_stride,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute out [tokens, SIZE_OUT] = x [tokens, SIZE_IN] @ weight [SIZE_OUT, SIZE_IN].T + bias in tiles of one shape.

    One program computes each sum, in the order of the input dimension. Grid: (tiles of rows, tiles of columns), so that
    programs that run at the same time share a part of the weight.

    With a third dimension of the grid, the heads, each head has vectors [tokens, SIZE_IN] and a weight of its own, and
    its results follow those of the head before it.
    """
    head = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, STEP)
    x_tile = x + head * x_head_stride + row.to(tl.int64)[:, None] * x_stride + step[None, :]
    weight_tile = weight + head * weight_head_stride + column.to(tl.int64)[None, :] * weight_stride + step[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, SIZE_IN, STEP):
        inside = step < SIZE_IN - first
        left = tl.load(x_tile + first, (row < tokens)[:, None] & inside[None, :], 0.0)
        right = tl.load(weight_tile + first, (column < SIZE_OUT)[None, :] & inside[:, None], 0.0)
        acc = dot(left, right, acc, INTERPRETED)
    if BIAS:
        acc += tl.load(bias + column, column < SIZE_OUT, 0.0).to(tl.float32)[None, :]
    place = out + head * SIZE_OUT + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), (row < tokens)[:, None] & (column < SIZE_OUT)[None, :])
