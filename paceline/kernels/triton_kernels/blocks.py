"""Blocks of the KV cache, packed for a transfer and moved many at a time."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paceline.kernels.triton_kernels.device import blocks as device

_CHUNK = 4096


def pack_blocks(pool: Tensor, slots: Tensor) -> Tensor:
    """Gathers blocks side by side.

    Args:
        pool: [slots, slot_elements], rows dense.
        slots: int64 [blocks], on the pool's device.

    Returns:
        [blocks, slot_elements], contiguous.
    """
    packed = torch.empty(len(slots), pool.shape[1], dtype=pool.dtype, device=pool.device)
    move_blocks(packed, pool, None, slots)
    return packed


def unpack_blocks(packed: Tensor, pool: Tensor, slots: Tensor) -> None:
    """The other way; slots are different from each other. See `pack_blocks`."""
    move_blocks(pool, packed, slots, None)


def move_blocks(target: Tensor, source: Tensor, target_slots: Tensor | None, source_slots: Tensor | None) -> None:
    """target[target_slots[i]] = source[source_slots[i]]; None stands for all, in order. See `pack_blocks`."""
    if target.shape[1] != source.shape[1] or target.dtype != source.dtype:
        raise ValueError(
            f"blocks of {target.shape[1]} {target.dtype} are no blocks of {source.shape[1]} {source.dtype}"
        )
    assert target.stride(1) == source.stride(1) == 1
    rows = [len(slots) for slots in (target_slots, source_slots) if slots is not None]
    # Where slots are not looked at something has to stand in their place.
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
