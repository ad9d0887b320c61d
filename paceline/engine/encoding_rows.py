"""The rows of encodings in the slots of an arena."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout


class EncodingRows:
    """Writes and reads rows of encodings. The leases of the kvtransfer service decide who may do so, and when.

    Args:
        layout: a layout with encodings.
        arena: all slots of the host, a flat tensor of the model's dtype.
    """

    def __init__(self, layout: KVLayout, arena: Tensor) -> None:
        (group,) = layout.part(encoding=True).groups
        self.block_tokens, self.hidden = group.block_tokens, group.shape.head_dim
        elements = layout.slot_bytes // layout.itemsize
        count = arena.numel() // elements
        self._blocks = arena.as_strided((count, self.block_tokens, self.hidden), (elements, self.hidden, 1))

    def read(self, slots: Sequence[int], start: int, end: int) -> Tensor:
        """Return a copy of rows [start, end) of an encoding: [end - start, size], on the CPU.

        Args:
            slots: all slots of the encoding, in order.
        """
        first = start // self.block_tokens
        used = torch.tensor(slots[first : -(-end // self.block_tokens)], dtype=torch.int64)
        before = first * self.block_tokens
        return self._blocks.index_select(0, used).flatten(0, 1)[start - before : end - before]

    def write(self, slots: Sequence[int], first_block: int, rows: Tensor) -> None:
        """Write an encoding to its blocks from `first_block` on, and fill the last block up with zeros.

        Args:
            slots: all slots of the encoding, in order.
            first_block: earlier blocks are published already and must not change.
            rows: [length, hidden], all rows of the encoding.

        Raises ValueError if the rows do not fit the blocks.
        """
        if rows.shape[1:] != (self.hidden,):
            raise ValueError(f"the rows have shape {list(rows.shape)} instead of [{len(rows)}, {self.hidden}]")
        if len(rows) > len(slots) * self.block_tokens:
            raise ValueError(f"{len(rows)} rows do not fit into {len(slots)} blocks of {self.block_tokens}")
        for block, slot in enumerate(slots[first_block:], first_block):
            part = rows[block * self.block_tokens : (block + 1) * self.block_tokens]
            self._blocks[slot, : len(part)] = part
            self._blocks[slot, len(part) :] = 0
