"""Moves of KV blocks that keep all bits."""

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
    """Copy target[target_slots[i]] = source[source_slots[i]], rows of SIZE elements. Grid: (rows, SIZE / BLOCK).

    Slots are int64. Without GATHERS the source slot is i; without SCATTERS the target slot is i.
    """
    row = tl.program_id(0).to(tl.int64)
    source_slot = tl.load(source_slots + row) if GATHERS else row
    target_slot = tl.load(target_slots + row) if SCATTERS else row
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    element = tl.load(source + source_slot * source_stride + index, index < SIZE)
    tl.store(target + target_slot * target_stride + index, element, index < SIZE)
