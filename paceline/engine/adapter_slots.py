"""The choice of the adapters in the device's slots. Pure, like the scheduler.

If the requests of a step have more adapters than there are slots, adapters take turns. An adapter keeps its place for
TURN_STEPS steps. Then the adapters that were left out for longest come next. So no request waits for ever behind
requests with other adapters, however many of these come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline.engine.step import AdapterPlaced

TURN_STEPS = 16
"""Steps after which an adapter makes way for those that were left out. In shorter turns, each adapter would have the
same small part of the steps, but a device with memory of its own would copy adapters more often."""


class AdapterSlots:
    """The adapters in the slots of the device after all planned steps, and those of the step that is being planned.

    Args:
        count: number of slots, and so the largest number of adapters in one step; 0 if the device takes no adapters.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._slots: dict[bytes, int] = {}  # the adapter that was used longest ago comes first
        self._wanted: dict[bytes, None] = {}  # in the order in which the step's chunks want them
        self._queue: list[bytes] = []
        """Adapters that take turns, in the order of their turns; empty if the last step had room for all."""
        self._turns: dict[bytes, int] = {}
        """Number of steps of the present turn of each adapter that has one."""
        self._allowed: Collection[bytes] = ()
        """Adapters that the step may have."""
        self._later: list[bytes] = []
        """Adapters of the background, in the order of their turns in the background's own steps."""

    def begin(self, urgent: Iterable[bytes], background: Iterable[bytes] = (), is_own: bool = False) -> None:
        """Begin to plan a step.

        Args:
            urgent: adapters of the requests that the step may include, in the order of their arrival; may repeat.
            background: adapters of requests of the background, which come after all others.
            is_own: whether the step is one of the rare ones that are meant for the background, too. It has a slot for
                one of the background's adapters, each in its turn.
        """
        self._wanted = {}
        first = dict.fromkeys(urgent)
        later = dict.fromkeys(background)
        every = first | later
        if len(every) <= self._count:
            self._queue, self._turns, self._allowed = [], {}, every
            return
        known = dict.fromkeys(adapter for adapter in self._queue if adapter in every)
        over = {adapter for adapter, steps in self._turns.items() if steps >= TURN_STEPS}
        self._queue = sorted(known | every, key=lambda adapter: (adapter not in first, adapter in over))
        self._allowed = allowed = self._queue[: self._count]
        self._turns = {each: 1 + (0 if each in over else self._turns.get(each, 0)) for each in allowed}
        if is_own and later and first:
            waiting = [adapter for adapter in self._later if adapter in later]
            waiting += [adapter for adapter in later if adapter not in waiting]
            self._later = [*waiting[1:], waiting[0]]
            self._allowed = [waiting[0], *(each for each in allowed if each != waiting[0])][: self._count]

    def fits(self, adapter: bytes) -> bool:
        """Return whether the step may include a request with this adapter; any step may include one without (empty)."""
        return not adapter or adapter in self._allowed

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
