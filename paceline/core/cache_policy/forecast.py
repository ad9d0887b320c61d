"""A cache policy that predicts how soon each block will be requested again."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.hazard import BINS, EDGES, HORIZON, Hazards, bin_of
from paceline.core.cache_policy.ranking import Block, Name
from paceline.core.cache_policy.sources import LEVELS, Sources

REMEMBERED = 1 << 16
"""Least number of block uses to remember. A small cache must know, too, how long blocks wait that it cannot keep."""
_RANK_EPOCHS = 8
_FIRST_RANKS = (1, 2, 4)
"""Earlier epochs after which blocks are ranked, because much is learned in the first ones."""

_KINDS = (0, 3, 4, 5, 5, 6, 6, 6, 6, 7)
"""The class of a block by the number of requests for it after the first. Larger numbers have the last class."""
_END = 1
"""The class of a block that was new and the last of its context: a follow-up request may not contain it. Such a block
in a context that continues an earlier one has class _END + 1."""
_FEW = 2
"""A block that more requests than this asked for again begins many contexts, which need not be continued."""
_BACKGROUND = 8
"""A block that only one request has used, which was less urgent than usual."""
_HINTED = 9
"""The first class of blocks with a hint. There are two for each range of times and level of belief in the source: one
of blocks that few requests used, and one of others."""
_TIMES = (60.0, 900.0)
"""Seconds of a hint above which another range begins: the next call of an agent, the next turn of a chat, and later."""
_TRUSTED = 0.125
"""Share of hinted blocks that are assumed to be requested in an epoch, before any were observed."""
_ASSUMED = (*[None] * _BACKGROUND, 0.0, *[None, None, *[_TRUSTED] * 2 * (LEVELS - 1)] * (len(_TIMES) + 1))
"""For each class, the argument of `Hazards`."""

_LAPSE = 64
"""Age in epochs at which a hint counts as wrong."""


@dataclass(slots=True)
class _Memory:
    """The history of a block, kept while it is cached and for some time after."""

    kind: int
    epoch: int
    """Epoch of the last use."""
    again: int = 0
    """Number of requests for the block after the first, whether it was cached or not."""
    goes_on: bool = False
    """Whether the block was new in a context that continues an earlier one."""
    here: bool = True
    source: bytes | None = None
    """The source of a hint of which it is not known yet whether it comes true."""


class Forecast(CachePolicy):
    """Evicts the block with the least worth first: the hits to expect from it, per time that it would occupy a slot.

    Nothing is tuned by hand for a kind of load. The policy counts how soon blocks are requested again (`Hazards`), by
    the number of earlier requests and the time since the last one. It counts evicted blocks, too. The effects:

    - Blocks that were requested again stay longer than blocks that were not.
    - If blocks are requested in a cycle, the newest are evicted.
    - Blocks with a hint form classes of their own, by the time that the hint promises and by how often other hints of
      its source came true. So a hint is worth as much as what it was worth before.
    - Before anything is known, blocks with a hint are evicted last. Among the others, the least often used blocks are
      evicted first, and among them the least recently used.

    Time is measured in epochs, each a fixed number of block uses. Blocks of one class and epoch have the same worth.
    The oldest of the blocks with the least worth are evicted first.

    Args:
        slots: number of blocks that the memory can hold.
        remembered: least number of block uses to remember.
    """

    def __init__(self, slots: int, remembered: int = REMEMBERED) -> None:
        super().__init__(slots)
        self._epoch_uses = max(4 * slots, remembered) // HORIZON
        self._uses = 0  # uses in this epoch
        self._hazards = Hazards(_ASSUMED)
        self._sources = Sources()
        self._memory: dict[Name, _Memory] = {}
        self._used: list[list[Name]] = [[] for _ in range(HORIZON)]  # names by epoch, a ring
        self._on_offer: list[dict[int, dict[Name, None]]] = [{} for _ in range(len(_ASSUMED))]  # by class and epoch
        self._epochs: list[list[int]] = [[] for _ in range(len(_ASSUMED))]  # epochs with blocks on offer, ascending
        self._rank()

    # ---- events of blocks

    def inserted(self, block: Block) -> None:
        memory = self._memory.get(block.name)
        if memory is None:
            memory = self._memory[block.name] = _Memory(0, self._hazards.now)
            if block.parent is not None and (parent := self._memory.get(block.parent)) is not None:
                memory.goes_on = parent.again <= _FEW if parent.again else parent.goes_on
            self._use(block.name, memory, _BACKGROUND if block.priority > 0 else _KINDS[0])
        else:
            memory.here = True
            self._use_again(block.name, memory)
        self._pass_time()

    def touched(self, block: Block) -> None:
        self._use_again(block.name, self._memory[block.name])
        self._pass_time()

    def released(self, block: Block) -> None:
        memory = self._memory[block.name]
        if memory.kind == _KINDS[0] and block.is_end:
            self._hazards.discard(memory.kind, memory.epoch)
            self._use(block.name, memory, _END + memory.goes_on)

    def hinted(self, block: Block) -> None:
        assert block.hint is not None
        memory = self._memory[block.name]
        self._hazards.discard(memory.kind, memory.epoch)
        level = self._sources.level(block.hint.source)
        trust = LEVELS * bisect_left(_TIMES, block.hint.seconds) + level
        memory.kind = _HINTED + 2 * trust + (memory.again > _FEW)
        memory.source = block.hint.source
        self._hazards.add(memory.kind, memory.epoch)

    def gone(self, block: Block, evicted: bool) -> None:
        memory = self._memory[block.name]
        memory.here = False
        self._forget(block.name, memory)

    def _use_again(self, name: Name, memory: _Memory) -> None:
        self._judge_hint(memory, came_true=True)
        self._hazards.ask(memory.kind, memory.epoch)
        memory.again += 1
        self._use(name, memory, _KINDS[min(memory.again, len(_KINDS) - 1)])

    def _judge_hint(self, memory: _Memory, came_true: bool) -> None:
        if memory.source is not None:
            self._sources.count(memory.source, came_true)
            memory.source = None

    def _use(self, name: Name, memory: _Memory, kind: int) -> None:
        memory.kind, memory.epoch = kind, self._hazards.now
        self._hazards.add(kind, memory.epoch)
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
        for name in self._used[(now - _LAPSE) % HORIZON]:
            if (memory := self._memory.get(name)) is not None and memory.epoch <= now - _LAPSE:
                self._judge_hint(memory, came_true=False)
        if now % _RANK_EPOCHS == 0 or now in _FIRST_RANKS:
            self._rank()
        self._cell = 0

    def _forget(self, name: Name, memory: _Memory) -> None:
        if not memory.here and self._hazards.now - memory.epoch >= HORIZON:
            del self._memory[name]

    def _rank(self) -> None:
        """Sort the cells, each a pair of class and age bin, by the order in which their blocks are to be evicted."""
        worth = self._hazards.worth()
        cells = [(kind, age) for kind in range(len(_ASSUMED)) for age in range(BINS)]
        self._order = sorted(cells, key=lambda cell: (worth[cell[0]][cell[1]], cell[0] != _BACKGROUND, -cell[1]))
        self._place = {cell: place for place, cell in enumerate(self._order)}
        self._cell = 0  # no block of the cells before this index is on offer

    # ---- blocks on offer

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

    def place(self, name: Name) -> int:
        """Return the place of a block's class and age in the order of eviction. A lower one goes first."""
        memory = self._memory[name]
        return self._place[memory.kind, bin_of(self._hazards.now - memory.epoch)]

    def is_new(self, name: Name) -> bool:
        """Return whether only one request has used a block that is here, as far as is remembered."""
        return self._memory[name].again == 0

    def _oldest(self, kind: int, age: int) -> int | None:
        """Return the oldest epoch within this bin of ages that has a block on offer, or None."""
        epochs, now = self._epochs[kind], self._hazards.now
        first = 0 if age == BINS - 1 else bisect_left(epochs, now - EDGES[age + 1] + 1)
        return epochs[first] if first < len(epochs) and epochs[first] <= now - EDGES[age] else None
