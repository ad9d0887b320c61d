"""A cache policy that predicts how soon each block will be requested again."""

from __future__ import annotations

from bisect import bisect_left, insort

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.hazard import BINS, EDGES
from paceline.core.cache_policy.history import KINDS, REMEMBERED, History
from paceline.core.cache_policy.ranking import Block, BlockRanking, Name


class ExpectedHits(BlockRanking):
    """Ranks blocks by the hits that a history predicts for them. Among blocks of one class and age bin, the least
    recently used goes first.

    Args:
        slots: number of blocks that the memory can hold.
        history: the uses of all blocks. Each event must reach the history before it reaches this ranking.
    """

    def __init__(self, slots: int, history: History) -> None:
        super().__init__(slots)
        self._history = history
        self._cells: dict[Name, tuple[int, int]] = {}  # class and epoch of each block on offer
        self._on_offer: list[dict[int, dict[Name, None]]] = [{} for _ in range(KINDS)]  # by class and epoch
        self._epochs: list[list[int]] = [[] for _ in range(KINDS)]  # epochs with blocks on offer, ascending
        self._now = 0
        self._cell = 0  # index into the order of epoch `_now`: no cell before it has a block on offer

    def offer(self, block: Block) -> None:
        cell = kind, epoch = self._history.kind_and_epoch(block.name)
        self._cells[block.name] = cell
        epochs = self._on_offer[kind]
        if epoch not in epochs:
            epochs[epoch] = {}
            insort(self._epochs[kind], epoch)
        epochs[epoch][block.name] = None
        if (place := self._history.place(kind, epoch)) < self._cell:
            self._cell = place

    def withdraw(self, block: Block) -> None:
        kind, epoch = self._cells.pop(block.name)
        epochs = self._on_offer[kind]
        del epochs[epoch][block.name]
        if not epochs[epoch]:
            del epochs[epoch]
            order = self._epochs[kind]
            del order[bisect_left(order, epoch)]

    def choose(self) -> Name:
        order = self._history.order
        if self._now != self._history.now:
            self._now, self._cell = self._history.now, 0
        while True:
            kind, age = order[self._cell]
            if self._epochs[kind] and (epoch := self._oldest(kind, age)) is not None:
                return next(iter(self._on_offer[kind][epoch]))
            self._cell += 1

    def _oldest(self, kind: int, age: int) -> int | None:
        """Return the oldest epoch within this bin of ages that has a block on offer, or None."""
        epochs = self._epochs[kind]
        first = 0 if age == BINS - 1 else bisect_left(epochs, self._now - EDGES[age + 1] + 1)
        return epochs[first] if first < len(epochs) and epochs[first] <= self._now - EDGES[age] else None


class Forecast(CachePolicy):
    """Evicts the block with the least worth first. A block's worth is the hits expected from it, divided by the time
    for which it would occupy a slot.

    Nothing is tuned by hand for a kind of load. The policy counts how soon blocks are requested again (`Hazards`), by
    the number of earlier requests and the time since the last one. It counts evicted blocks, too. The effects:

    - Blocks that were requested again stay longer than blocks that were not.
    - If blocks are requested in a cycle, the newest are evicted.
    - Blocks with a hint form classes of their own, by the time in the hint and by the share of its source's hints that
      came true. So a hint counts as much as earlier hints of its kind have proved to be worth.
    - Before anything is known, blocks with a hint are evicted last. Among the others, the least often used blocks are
      evicted first, and among them the least recently used.

    Args:
        slots: number of blocks that the memory can hold.
        remembered: least number of block uses to remember.
    """

    def __init__(self, slots: int, remembered: int = REMEMBERED) -> None:
        super().__init__(slots)
        self.history = History(slots, remembered)
        """Everything that the policy has learned. It learns even while no block has to be evicted."""
        self._ranking = ExpectedHits(slots, self.history)

    def choose(self) -> Name:
        return self._ranking.choose()

    def offer(self, block: Block) -> None:
        self._ranking.offer(block)

    def withdraw(self, block: Block) -> None:
        self._ranking.withdraw(block)

    def inserted(self, block: Block) -> None:
        self.history.inserted(block)

    def touched(self, block: Block) -> None:
        self.history.touched(block)

    def released(self, block: Block) -> None:
        self.history.released(block)

    def hinted(self, block: Block) -> None:
        self.history.hinted(block)

    def gone(self, block: Block, evicted: bool) -> None:
        self.history.gone(block.name)
