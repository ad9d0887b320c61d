"""Moves blocks of the KV cache, bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def move(
    target,
    source,
    target_slots,
    source_slots,
    target_stride,
    source_stride,
    SIZE: tl.constexpr,
    GATHERS: tl.constexpr,
    SCATTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """target[target_slots[i]] = source[source_slots[i]], rows of SIZE elements; slots int64, or i itself where the
    source does not gather, or the target does not scatter. Grid: (rows, SIZE / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    source_slot = tl.load(source_slots + row) if GATHERS else row
    target_slot = tl.load(target_slots + row) if SCATTERS else row
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    element = tl.load(source + source_slot * source_stride + index, index < SIZE)
    tl.store(target + target_slot * target_stride + index, element, index < SIZE)
