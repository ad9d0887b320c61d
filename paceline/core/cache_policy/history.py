"""The knowledge of a forecast: when each block was used, and how soon blocks like it are requested again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass

from paceline.core.cache_policy.hazard import BINS, HORIZON, Hazards, bin_of
from paceline.core.cache_policy.ranking import Block, Name

LEVELS = 2
"""Number of levels of belief in a source. Level 0 is for sources whose hints rarely come true."""

_SHARES = (0.2,)
"""Shares of hints that came true at which a higher level begins."""
_PRIOR = 16.0
"""Weight of the assumption that half of the hints of a new source come true, in hinted blocks."""
_WEIGHT = 4096.0
"""When the counts of a source reach this sum, they are halved, so that newer hints weigh more."""
_SOURCES = 1024
"""Largest number of sources to remember. The source without hints for the longest time is forgotten first, and later
counts as new.
"""

REMEMBERED = 1 << 16
"""Least number of block uses to remember. A small cache must also learn how long blocks wait that it cannot keep."""
_RANK_EPOCHS = 8
_FIRST_RANKS = (1, 2, 4)
"""The first epochs after which blocks are ranked anew. They come early, because much is learned in early epochs."""

_MOST_USES = 65
_USES = (0, *(1 + (again - 1).bit_length() for again in range(1, _MOST_USES + 1)))
"""The range of the number of requests for a block after the first: 0, 1, 2, 3-4, 5-8 and so on. Larger numbers have the
last range. With few ranges, a popular prefix would be worth no more than one that was requested ten times."""
_RANGES = _USES[-1] + 1

_NEW = 0
"""The class of a block that only one request has used."""
_END = 1
"""The class of a new block that was the last of its context: a follow-up request may not contain it. Such a block
in a context that continues an earlier one has class _END + 1."""
_FEW = 2
"""A block that was requested again more often than this begins many contexts, so it need not mean that a context is
continued.
"""
_BACKGROUND = 3
"""The class of a block that only one request has used, if this request was less urgent than usual."""
_AGAIN = 3
"""A block that was requested again has class _AGAIN plus its range, which is at least 1."""
_HINTED = _AGAIN + _RANGES
"""The first class of blocks with a hint. There is one class for each combination of a range of times, a level of belief
in the source, and a range of uses.
"""
_TIMES = (60.0, 900.0)
"""Seconds of a hint above which another range begins: the next call of an agent, the next turn of a chat, and later."""
_TRUSTED = 0.125
"""Share of hinted blocks that are assumed to be requested in an epoch, before any were observed."""
_ASSUMED = (
    *[None] * _BACKGROUND,
    0.0,
    *[None] * (_RANGES - 1),
    *[*[None] * _RANGES, *[_TRUSTED] * _RANGES * (LEVELS - 1)] * (len(_TIMES) + 1),
)
"""The argument `assumed` of `Hazards`, for each class."""
KINDS = len(_ASSUMED)
"""Number of classes by which the uses of blocks are counted apart."""

_LAPSE = 64
"""Age in epochs at which a hint counts as wrong."""


@dataclass(slots=True)
class _Record:
    true: float = 0.0
    all: float = 0.0


class Sources:
    """For each source of hints, the number of hinted blocks, and how many of them were requested again."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, _Record] = OrderedDict()

    def level(self, source: bytes) -> int:
        """Return the level of belief in hints of this source, from 0 to LEVELS - 1; higher is more trusted."""
        record = self._records.get(source, _Record())
        return bisect_right(_SHARES, (record.true + _PRIOR / 2) / (record.all + _PRIOR))

    def count(self, source: bytes, came_true: bool) -> None:
        """Count a hinted block whose hint came true, or lapsed because no request used the block for a long time."""
        record = self._records.setdefault(source, _Record())
        self._records.move_to_end(source)
        record.true += came_true
        record.all += 1
        if record.all >= _WEIGHT:
            record.true, record.all = record.true / 2, record.all / 2
        if len(self._records) > _SOURCES:
            self._records.popitem(last=False)


def _range_of(again: int) -> int:
    return _USES[min(again, _MOST_USES)]


@dataclass(slots=True)
class _Memory:
    """The history of a block, kept while it is cached and for some time after."""

    kind: int
    epoch: int
    """Epoch in which the block was last used."""
    again: int = 0
    """Number of requests for the block after the first, whether it was cached or not."""
    goes_on: bool = False
    """Whether the block was new in a context that continues an earlier context."""
    here: bool = True
    source: bytes | None = None
    """The source of a hint that has neither come true nor lapsed yet; None if there is no such hint."""


class History:
    """Remembers the uses of blocks, evicted ones included, and ranks classes and ages of blocks by their worth.

    Time is measured in epochs, each a fixed number of block uses. A block's worth depends only on its class and on the
    epoch of its last use.

    Args:
        slots: number of blocks that the memory can hold.
        remembered: least number of block uses to remember.
    """

    def __init__(self, slots: int, remembered: int = REMEMBERED) -> None:
        self._epoch_uses = max(4 * slots, remembered) // HORIZON
        self._uses = 0  # uses in this epoch
        self._hazards = Hazards(_ASSUMED)
        self._sources = Sources()
        self._memory: dict[Name, _Memory] = {}
        self._used: list[list[Name]] = [[] for _ in range(HORIZON)]  # names by epoch, a ring
        self._rank()

    @property
    def now(self) -> int:
        """The current epoch. The order of cells changes only when an epoch begins."""
        return self._hazards.now

    def __len__(self) -> int:
        return len(self._memory)

    def kind_and_epoch(self, name: Name) -> tuple[int, int]:
        """Return the class of a block and the epoch of its last use. A forgotten block counts as old and used once."""
        memory = self._memory.get(name)
        return (_NEW, self.now - HORIZON) if memory is None else (memory.kind, memory.epoch)

    def place(self, kind: int, epoch: int) -> int:
        """Return the index in `order` of the cell of blocks of this class and epoch."""
        return self._place[kind][bin_of(self._hazards.now - epoch)]

    # ---- events of blocks

    def inserted(self, block: Block) -> None:
        memory = self._memory.get(block.name)
        if memory is None:
            memory = self._memory[block.name] = _Memory(_NEW, self._hazards.now)
            if block.parent is not None and (parent := self._memory.get(block.parent)) is not None:
                memory.goes_on = parent.again <= _FEW if parent.again else parent.goes_on
            self._use(block.name, memory, _BACKGROUND if block.priority > 0 else _NEW)
        else:
            memory.here = True
            self._use_again(block.name, memory)
        self._pass_time()

    def touched(self, block: Block) -> None:
        self._use_again(block.name, self._memory[block.name])
        self._pass_time()

    def released(self, block: Block) -> None:
        memory = self._memory[block.name]
        if memory.kind == _NEW and block.is_end:
            self._hazards.discard(memory.kind, memory.epoch)
            self._use(block.name, memory, _END + memory.goes_on)

    def hinted(self, block: Block) -> None:
        assert block.hint is not None
        memory = self._memory[block.name]
        self._hazards.discard(memory.kind, memory.epoch)
        level = self._sources.level(block.hint.source)
        trust = LEVELS * bisect_left(_TIMES, block.hint.seconds) + level
        memory.kind = _HINTED + _RANGES * trust + _range_of(memory.again)
        memory.source = block.hint.source
        self._hazards.add(memory.kind, memory.epoch)

    def gone(self, name: Name) -> None:
        memory = self._memory[name]
        memory.here = False
        self._forget(name, memory)

    def _use_again(self, name: Name, memory: _Memory) -> None:
        self._judge_hint(memory, came_true=True)
        self._hazards.ask(memory.kind, memory.epoch)
        memory.again += 1
        self._use(name, memory, _AGAIN + _range_of(memory.again))

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

    def _forget(self, name: Name, memory: _Memory) -> None:
        if not memory.here and self._hazards.now - memory.epoch >= HORIZON:
            del self._memory[name]

    def _rank(self) -> None:
        """Sort the cells, each a pair of class and age bin, by the order in which their blocks are to be evicted."""
        worth = self._hazards.worth()
        cells = [(kind, age) for kind in range(KINDS) for age in range(BINS)]
        self.order = sorted(cells, key=lambda cell: (worth[cell[0]][cell[1]], cell[0] != _BACKGROUND, -cell[1]))
        self._place = [[0] * BINS for _ in range(KINDS)]
        for place, (kind, age) in enumerate(self.order):
            self._place[kind][age] = place
