"""By what is known of how soon blocks like these are asked for again."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from paceline.core.cache_policy.base import Block, CachePolicy, Name
from paceline.core.cache_policy.hazard import BIN, BINS, EDGES, HORIZON, Hazards

_REMEMBERED = 1 << 16
"""Uses of blocks that are remembered at least, so that a small cache knows how long others wait."""
_REFRESH_EPOCHS = 8

_TURNS = (0, 1, 2, 3, 3, 4, 4, 4, 4, 5)
"""Turns that are alike."""
_GAPS = 4
"""Classes of the time between the last two uses."""
_ENDS = 6 * (_GAPS + 1)
CLASSES = _ENDS + 2


@dataclass(slots=True)
class _Memory:
    """What is known of a block, while it is here and for some time after."""

    kind: int
    epoch: int
    """Of its last use."""
    turn: int
    """How often the context was asked for that it was new in, and it since then."""
    uses: int = 0
    gap: int = 0
    """Class of the time between its last two uses, or of its context's; 0 where there is none."""
    here: bool = True


class Forecast(CachePolicy):
    def __init__(self, slots: int, remembered: int = _REMEMBERED) -> None:
        super().__init__(slots)
        self._epoch_uses = max(4 * slots, remembered) // HORIZON
        self._uses = 0
        self._hazards = Hazards(CLASSES)
        self._memory: dict[Name, _Memory] = {}
        self._used: list[list[Name]] = [[] for _ in range(HORIZON)]  # names by epoch, a ring
        self._on_offer: list[dict[int, dict[Name, None]]] = [{} for _ in range(CLASSES)]  # by class and epoch
        self._epochs: list[list[int]] = [[] for _ in range(CLASSES)]  # those of which something is on offer, in order
        self._rank()

    # ---- what happens to blocks

    def inserted(self, block: Block) -> None:
        memory = self._memory.get(block.name)
        if memory is not None:
            memory.here = True
            self._again(memory)
        else:
            parent = None if block.parent is None else self._memory.get(block.parent)
            memory = self._memory[block.name] = _Memory(0, self._hazards.now, 0)
            # Where many contexts go on from the parent, how often it was asked for says nothing of each.
            if parent is not None and parent.uses <= 2:
                memory.turn, memory.gap = parent.turn, parent.gap
        self._note(block.name, memory)

    def touched(self, block: Block) -> None:
        memory = self._memory[block.name]
        self._again(memory)
        self._note(block.name, memory)

    def _again(self, memory: _Memory) -> None:
        age = self._hazards.now - memory.epoch
        self._hazards.ask(memory.kind, memory.epoch)
        memory.uses += 1
        memory.turn += 1
        memory.gap = 1 + (BIN[age] if age < HORIZON else BINS - 1) * _GAPS // BINS

    def _note(self, name: Name, memory: _Memory) -> None:
        memory.epoch = self._hazards.now
        memory.kind = _TURNS[min(memory.turn, len(_TURNS) - 1)] * (_GAPS + 1) + memory.gap
        self._hazards.add(memory.kind)
        self._used[memory.epoch % HORIZON].append(name)
        self._uses += 1
        if self._uses >= self._epoch_uses:
            self._uses = 0
            self._tick()

    def released(self, block: Block) -> None:
        memory = self._memory[block.name]
        if memory.uses == 0 and block.name not in self._dependents and memory.kind < _ENDS:
            # The end of a context is often not part of what follows.
            self._hazards.discard(memory.kind, memory.epoch)
            memory.epoch = self._hazards.now
            memory.kind = _ENDS + (memory.turn > 0)
            self._hazards.add(memory.kind)
            self._used[memory.epoch % HORIZON].append(block.name)

    def gone(self, block: Block, evicted: bool) -> None:
        memory = self._memory[block.name]
        memory.here = False
        if self._hazards.now - memory.epoch >= HORIZON:
            del self._memory[block.name]

    # ---- time

    def _tick(self) -> None:
        self._hazards.tick()
        now = self._hazards.now
        forgotten, self._used[now % HORIZON] = self._used[now % HORIZON], []
        for name in forgotten:
            memory = self._memory.get(name)
            if memory is not None and not memory.here and now - memory.epoch >= HORIZON:
                del self._memory[name]
        if now % _REFRESH_EPOCHS == 0:
            self._rank()
        self._cell = 0

    def _rank(self) -> None:
        indices = self._hazards.indices()
        self._order = sorted(((index, -age, kind) for kind, row in enumerate(indices) for age, index in enumerate(row)))
        self._place = [[0] * BINS for _ in range(CLASSES)]
        for place, (_, age, kind) in enumerate(self._order):
            self._place[kind][-age] = place
        self._cell = 0  # before this one of the order nothing is on offer

    # ---- what is on offer

    def offer(self, block: Block) -> None:
        memory = self._memory[block.name]
        epochs = self._on_offer[memory.kind]
        if memory.epoch not in epochs:
            epochs[memory.epoch] = {}
            insort(self._epochs[memory.kind], memory.epoch)
        epochs[memory.epoch][block.name] = None
        age = self._hazards.now - memory.epoch
        self._cell = min(self._cell, self._place[memory.kind][BIN[age] if age < HORIZON else BINS - 1])

    def withdraw(self, block: Block) -> None:
        memory = self._memory[block.name]
        epochs = self._on_offer[memory.kind]
        names = epochs[memory.epoch]
        del names[block.name]
        if not names:
            del epochs[memory.epoch]
            order = self._epochs[memory.kind]
            del order[bisect_left(order, memory.epoch)]

    def choose(self) -> Name:
        now = self._hazards.now
        while True:
            _, age, kind = self._order[self._cell]
            epochs = self._epochs[kind]
            if epochs:
                oldest = 0 if -age == BINS - 1 else now - EDGES[1 - age] + 1
                place = bisect_left(epochs, oldest)
                if place < len(epochs) and epochs[place] <= now - EDGES[-age]:
                    return next(iter(self._on_offer[kind][epochs[place]]))
            self._cell += 1
