"""The adapter of each row of the device's state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.engine.step import AdapterPlaced, RowAssigned
from paceline.kernels.transfer import to_device


class RowAdapters:
    """The adapters of up to `count` rows, and the slots of the device in which adapters are."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._adapters = [b""] * count
        self._slots: dict[bytes, int] = {}

    def assign(self, update: RowAssigned) -> None:
        self._adapters[update.row] = update.adapter

    def place(self, placed: AdapterPlaced) -> None:
        """Note that an adapter is in a slot, in place of the one that was there."""
        self._slots = {adapter: slot for adapter, slot in self._slots.items() if slot != placed.slot}
        self._slots[placed.adapter] = placed.slot

    def of(self, spans: Sequence[tuple[int, int, int]]) -> Tensor | None:
        """Return the slots of the adapters of tokens, as `AttentionBatch.adapters`: int64 [tokens], or None.

        Args:
            spans: (row, start, end) of the tokens of each row. Rows with an adapter must have it in a slot.
        """
        adapters = [self._adapters[row] for row, _, _ in spans]
        if not any(adapters):
            return None
        slots = [self._slots[adapter] if adapter else -1 for adapter in adapters]
        tokens = np.repeat(np.array(slots, dtype=np.int64), [end - start for _, start, end in spans])
        return to_device(torch.from_numpy(tokens), self._device)
