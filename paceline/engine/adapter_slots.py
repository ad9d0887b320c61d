"""The choice of the adapters in the device's slots. Pure, like the scheduler."""

from __future__ import annotations

from paceline.engine.step import AdapterPlaced


class AdapterSlots:
    """The adapters in the slots of the device after all planned steps, and those of the step that is being planned.

    Args:
        count: number of slots, and so the largest number of adapters in one step; 0 if the device takes no adapters.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._slots: dict[bytes, int] = {}  # the adapter that was used longest ago comes first
        self._wanted: dict[bytes, None] = {}  # in the order in which the step's chunks want them

    def begin(self) -> None:
        """Begin to plan a step."""
        self._wanted = {}

    def fits(self, adapter: bytes) -> bool:
        """Return whether the step may include a request with this adapter; any step may include one without (empty)."""
        return not adapter or adapter in self._wanted or len(self._wanted) < self._count

    def want(self, adapter: bytes) -> None:
        """Note that the step includes a request with this adapter, which must fit."""
        if adapter:
            self._wanted[adapter] = None

    def place(self) -> tuple[AdapterPlaced, ...]:
        """Return the adapters that the step puts into slots. Those that were used longest ago make room."""
        placed = []
        for adapter in self._wanted:
            slot = self._slots.pop(adapter, None)
            if slot is None:
                slot = self._free_slot()
                placed.append(AdapterPlaced(slot, adapter))
            self._slots[adapter] = slot
        return tuple(placed)

    def _free_slot(self) -> int:
        if len(self._slots) < self._count:
            return next(slot for slot in range(self._count) if slot not in self._slots.values())
        return self._slots.pop(next(adapter for adapter in self._slots if adapter not in self._wanted))
