"""By what is known of how soon blocks like these are asked for again."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from paceline.core.cache_policy.base import Block, CachePolicy, Name
from paceline.core.cache_policy.hazard import BINS, EDGES, HORIZON, Hazards, bin_of

_REMEMBERED = 1 << 16
"""Uses of blocks that are remembered at least, so that a small cache knows how long blocks wait that it cannot keep."""
_RANK_EPOCHS = 8

_KINDS = (0, 3, 4, 5, 5, 6, 6, 6, 6, 7)
"""The class of a block by how often it was asked for again; more often than that is like the last."""
_END = 1
"""The class of a block that was new and the last one of its context: it may not be part of what follows. One more is
the class of such blocks in contexts that go on with an earlier one."""
_FEW = 2
"""A block that was asked for again by more is the beginning of many contexts, which need not go on."""
_CLASSES = 8


@dataclass(slots=True)
class _Memory:
    """What is known of a block, while it is here and for some time after."""

    kind: int
    epoch: int
    """Of its last use."""
    again: int = 0
    """How often it was asked for again, whether it was here or not."""
    goes_on: bool = False
    """Whether it was new in a context that goes on with an earlier one."""
    here: bool = True


class Forecast(CachePolicy):
    """What is worth least goes first: the hits that keeping it promises, for the time that it would take up a slot.

    Nothing is set by hand for a kind of load. How soon blocks are asked for again is counted (`Hazards`) by how often
    they were asked for before and how long they have waited, also of blocks that have gone. So one that proved useful
    stays while others are given up before they were; where blocks come in turn, the newest go; and where nothing is
    known yet, those that were used least often, and longest ago.

    Time is counted in uses of blocks, in epochs. Blocks of one class and epoch are worth the same; the oldest of those
    that are worth least go first.
    """

    def __init__(self, slots: int, remembered: int = _REMEMBERED) -> None:
        super().__init__(slots)
        self._epoch_uses = max(4 * slots, remembered) // HORIZON
        self._uses = 0  # in this epoch
        self._hazards = Hazards(_CLASSES)
        self._memory: dict[Name, _Memory] = {}
        self._used: list[list[Name]] = [[] for _ in range(HORIZON)]  # names by epoch, a ring
        self._on_offer: list[dict[int, dict[Name, None]]] = [{} for _ in range(_CLASSES)]  # by class and epoch
        self._epochs: list[list[int]] = [[] for _ in range(_CLASSES)]  # those of which something is on offer, in order
        self._rank()

    # ---- what happens to blocks

    def inserted(self, block: Block) -> None:
        memory = self._memory.get(block.name)
        if memory is None:
            memory = self._memory[block.name] = _Memory(0, self._hazards.now)
            if block.parent is not None and (parent := self._memory.get(block.parent)) is not None:
                memory.goes_on = parent.again <= _FEW if parent.again else parent.goes_on
            self._use(block.name, memory, _KINDS[0])
        else:
            memory.here = True
            self._use_again(block.name, memory)
        self._pass_time()

    def touched(self, block: Block) -> None:
        self._use_again(block.name, self._memory[block.name])
        self._pass_time()

    def released(self, block: Block) -> None:
        memory = self._memory[block.name]
        if memory.kind == _KINDS[0] and not self.is_needed(block):
            self._hazards.discard(memory.kind, memory.epoch)
            self._use(block.name, memory, _END + memory.goes_on)

    def gone(self, block: Block, evicted: bool) -> None:
        memory = self._memory[block.name]
        memory.here = False
        self._forget(block.name, memory)

    def _use_again(self, name: Name, memory: _Memory) -> None:
        self._hazards.ask(memory.kind, memory.epoch)
        memory.again += 1
        self._use(name, memory, _KINDS[min(memory.again, len(_KINDS) - 1)])

    def _use(self, name: Name, memory: _Memory, kind: int) -> None:
        memory.kind, memory.epoch = kind, self._hazards.now
        self._hazards.add(kind)
        self._used[memory.epoch % HORIZON].append(name)

    # ---- time

    def _pass_time(self) -> None:
        self._uses += 1
        if self._uses < self._epoch_uses:
            return
        self._uses = 0
        self._hazards.tick()
        now = self._hazards.now
        names, self._used[now % HORIZON] = self._used[now % HORIZON], []
        for name in names:
            if (memory := self._memory.get(name)) is not None:
                self._forget(name, memory)
        if now % _RANK_EPOCHS == 0:
            self._rank()
        self._cell = 0

    def _forget(self, name: Name, memory: _Memory) -> None:
        if not memory.here and self._hazards.now - memory.epoch >= HORIZON:
            del self._memory[name]

    def _rank(self) -> None:
        """Puts the cells, which are classes at ages, in the order in which their blocks are to go."""
        worth = self._hazards.worth()
        cells = [(kind, age) for kind in range(_CLASSES) for age in range(BINS)]
        self._order = sorted(cells, key=lambda cell: (worth[cell[0]][cell[1]], -cell[1]))
        self._place = {cell: place for place, cell in enumerate(self._order)}
        self._cell = 0  # of those before this place nothing is on offer

    # ---- what is on offer

    def offer(self, block: Block) -> None:
        memory = self._memory[block.name]
        epochs = self._on_offer[memory.kind]
        if memory.epoch not in epochs:
            epochs[memory.epoch] = {}
            insort(self._epochs[memory.kind], memory.epoch)
        epochs[memory.epoch][block.name] = None
        self._cell = min(self._cell, self._place[memory.kind, bin_of(self._hazards.now - memory.epoch)])

    def withdraw(self, block: Block) -> None:
        memory = self._memory[block.name]
        epochs = self._on_offer[memory.kind]
        del epochs[memory.epoch][block.name]
        if not epochs[memory.epoch]:
            del epochs[memory.epoch]
            order = self._epochs[memory.kind]
            del order[bisect_left(order, memory.epoch)]

    def choose(self) -> Name:
        while (epoch := self._oldest(*self._order[self._cell])) is None:
            self._cell += 1
        kind, _ = self._order[self._cell]
        return next(iter(self._on_offer[kind][epoch]))

    def _oldest(self, kind: int, age: int) -> int | None:
        """The first epoch within this bin of ages of which something is on offer."""
        epochs, now = self._epochs[kind], self._hazards.now
        first = 0 if age == BINS - 1 else bisect_left(epochs, now - EDGES[age + 1] + 1)
        return epochs[first] if first < len(epochs) and epochs[first] <= now - EDGES[age] else None
