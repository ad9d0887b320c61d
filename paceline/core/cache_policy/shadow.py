"""A cache of names without blocks, which shows how many blocks a ranking would have kept long enough to be found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from paceline.core.cache_policy.ranking import Block, BlockRanking, Name


class Shadow:
    """Replays requests for blocks against a ranking, with the same rules of eviction as in a memory.

    Args:
        ranking: decides which block is evicted. Its number of slots is the size of the cache.
        in_use: tells whether a request uses a block. Such a block is not evicted.
    """

    def __init__(self, ranking: BlockRanking, in_use: Callable[[Name], bool]) -> None:
        self._ranking = ranking
        self._in_use = in_use
        self._blocks: dict[Name, Block] = {}
        self._children: defaultdict[Name, int] = defaultdict(int)
        self._offers = 0
        self._passed: set[Name] = set()  # blocks that were to be evicted, but were in use
        self._clock = 0

    def use(self, name: Name, parent: Name | None) -> bool:
        """Request a block after its parent. Return whether it is found; if not, it is added."""
        self._clock += 1
        block = self._blocks.get(name)
        if block is not None:
            self._withdraw(block)
            self._passed.discard(name)
            block.used = self._clock
            self._ranking.touched(block)
            self._offer(block)
            return True
        while len(self._blocks) >= self._ranking.slots and self._offers:
            self._evict()
        block = self._blocks[name] = Block(name, parent, 0, 0, (), self._clock)
        self._ranking.inserted(block)
        if parent is not None:
            self._children[parent] += 1
            if (above := self._blocks.get(parent)) is not None:
                self._withdraw(above)
        self._offer(block)
        return False

    def release(self, name: Name) -> None:
        """Note that no request uses a block any more."""
        if name in self._passed:
            self._passed.remove(name)
            if (block := self._blocks.get(name)) is not None:
                self._offer(block)

    def reconsider(self, name: Name) -> None:
        """Rank a block again, because more is known about it."""
        block = self._blocks.get(name)
        if block is not None and block.offered:
            self._withdraw(block)
            self._offer(block)

    def _evict(self) -> None:
        block = self._blocks[self._ranking.choose()]
        self._withdraw(block)
        if self._in_use(block.name):
            self._passed.add(block.name)
            return
        del self._blocks[block.name]
        self._ranking.gone(block, evicted=True)
        if block.parent is None:
            return
        self._children[block.parent] -= 1
        if not self._children[block.parent]:
            del self._children[block.parent]
            if (above := self._blocks.get(block.parent)) is not None:
                self._offer(above)

    def _offer(self, block: Block) -> None:
        if not block.offered and block.name not in self._children:
            block.offered = True
            self._offers += 1
            self._ranking.offer(block)

    def _withdraw(self, block: Block) -> None:
        if block.offered:
            block.offered = False
            self._offers -= 1
            self._ranking.withdraw(block)
