"""Moves of many KV blocks at a time, and their packing for a transfer."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paceline.kernels.triton_kernels.device import blocks as device

_CHUNK = 4096


def pack_blocks(pool: Tensor, slots: Tensor) -> Tensor:
    """Gather blocks into a contiguous tensor.

    Args:
        pool: [slots, slot_elements], with dense rows.
        slots: int64 [blocks], on the pool's device.

    Returns:
        [blocks, slot_elements], contiguous.
    """
    packed = torch.empty(len(slots), pool.shape[1], dtype=pool.dtype, device=pool.device)
    move_blocks(packed, pool, None, slots)
    return packed


def unpack_blocks(packed: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Copy blocks that `pack_blocks` has packed to `slots` of a pool. The slots must all be different."""
    move_blocks(pool, packed, slots, None)


def move_blocks(target: Tensor, source: Tensor, target_slots: Tensor | None, source_slots: Tensor | None) -> None:
    """Copy target[target_slots[i]] = source[source_slots[i]]. None in place of slots means all rows in order."""
    if target.shape[1] != source.shape[1] or target.dtype != source.dtype:
        raise ValueError(
            f"target blocks have {target.shape[1]} {target.dtype}, source blocks {source.shape[1]} {source.dtype}"
        )
    assert target.stride(1) == source.stride(1) == 1
    rows = [len(slots) for slots in (target_slots, source_slots) if slots is not None]
    # Target or source stand in for slots that the kernel does not read.
    device.move[rows[0], triton.cdiv(target.shape[1], _CHUNK)](
        target,
        source,
        target if target_slots is None else target_slots,
        source if source_slots is None else source_slots,
        target.stride(0),
        source.stride(0),
        SIZE=target.shape[1],
        GATHERS=source_slots is not None,
        SCATTERS=target_slots is not None,
        BLOCK=_CHUNK,
    )
