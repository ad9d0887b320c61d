"""The default cache policy: the better of a forecast and ARC, as measured on a sample of the load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from paceline.core.cache_policy.arc import ARC
from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.forecast import ExpectedHits, Forecast
from paceline.core.cache_policy.ranking import Block, BlockRanking, Name

_SHADOW_SLOTS = 100
"""Least number of slots of a shadow cache, unless the memory has fewer than twice as many."""
_SHIFTS = range(1, 5)
"""Base-2 logarithms of the possible sampling rates: one of 2, 4, 8 or 16 blocks is sampled. A larger memory has a
smaller share of sampled blocks, because each of them costs time.
"""
_DECISIVE = 0.5
"""Lead in hits that makes a ranking the leader, as a share of the slots of a shadow cache."""


class Shadow:
    """Replays requests for blocks against a ranking, with the same rules of eviction as in a memory.

    Args:
        ranking: chooses the block to evict. Its number of slots is the size of the shadow cache.
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
        """Request a block after its parent. Return whether the block was in the shadow cache; if not, it is added."""
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
        """Rank a block again, because its hint or its history has changed."""
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


class Adaptive(CachePolicy):
    """Evicts by `Forecast` or by `ARC`, whichever has found more blocks lately.

    Both policies rank all blocks at all times, and one of them leads. Each also ranks a shadow cache, which has only
    names. The shadow caches see a sample of the blocks, and have the same share of the slots. The other ranking becomes
    the leader as soon as its shadow cache is ahead by `_DECISIVE`. A smaller lead is not worth a change, because the
    memory still holds what the former leader kept. The lead is counted up to this bound only, so that an old lead is
    lost quickly if the load changes.

    Args:
        slots: number of blocks that the memory can hold.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        shift = max((shift for shift in _SHIFTS if slots >> shift >= _SHADOW_SLOTS), default=_SHIFTS[0])
        self._mask = (1 << shift) - 1
        sampled = max(1, slots >> shift)
        self._forecast = Forecast(slots)
        self._arc = ARC(slots)
        self._leader: BlockRanking = self._forecast
        self._sampled_arc = ARC(sampled)
        self._shadow_arc = Shadow(self._sampled_arc, self._is_in_use)
        self._shadow_forecast = Shadow(ExpectedHits(sampled, self._forecast.history), self._is_in_use)
        self._nearest: dict[Name, Name | None] = {}
        """For each block, the nearest sampled block at or before it in its context."""
        self._decisive = max(1.0, _DECISIVE * sampled)
        self._lead = 0.0
        """Number of blocks found by ARC's shadow cache minus the number found by the forecast's shadow cache."""

    def choose(self) -> Name:
        return self._leader.choose()

    def offer(self, block: Block) -> None:
        self._forecast.offer(block)
        self._arc.offer(block)

    def withdraw(self, block: Block) -> None:
        self._forecast.withdraw(block)
        self._arc.withdraw(block)

    def inserted(self, block: Block) -> None:
        self._forecast.inserted(block)
        self._arc.inserted(block)
        before = None if block.parent is None else self._nearest.get(block.parent)
        if self._is_sampled(block):
            self._nearest[block.name] = block.name
            self._compare(block.name, before)
        else:
            self._nearest[block.name] = before

    def touched(self, block: Block) -> None:
        self._forecast.touched(block)
        self._arc.touched(block)
        if self._is_sampled(block):
            self._compare(block.name, None if block.parent is None else self._nearest.get(block.parent))

    def hinted(self, block: Block) -> None:
        self._forecast.hinted(block)
        if self._is_sampled(block):
            self._shadow_forecast.reconsider(block.name)

    def released(self, block: Block) -> None:
        self._forecast.released(block)
        if self._is_sampled(block):
            self._release_shadows(block.name)
            if block.is_end:
                self._shadow_forecast.reconsider(block.name)  # the block may have changed its class

    def gone(self, block: Block, evicted: bool) -> None:
        self._forecast.gone(block, evicted)
        self._arc.gone(block, evicted)
        del self._nearest[block.name]
        if not evicted and self._is_sampled(block):
            self._release_shadows(block.name)  # the block may have been in use

    def _is_sampled(self, block: Block) -> bool:
        return block.name[1][-1] & self._mask == 0

    def _is_in_use(self, name: Name) -> bool:
        block = self.get(name)
        return block is not None and not block.evictable

    def _release_shadows(self, name: Name) -> None:
        self._shadow_forecast.release(name)
        self._shadow_arc.release(name)

    def _compare(self, name: Name, parent: Name | None) -> None:
        """Request a block from both shadow caches. If the other ranking's cache is far enough ahead, make that ranking
        the leader.
        """
        forecast = self._shadow_forecast.use(name, parent)
        arc = self._shadow_arc.use(name, parent)
        if forecast == arc:
            return
        self._lead = max(-self._decisive, min(self._lead + arc - forecast, self._decisive))
        if self._lead == self._decisive and self._leader is self._forecast:
            self._leader = self._arc
            self._arc.target = self._sampled_arc.target / self._sampled_arc.slots * self.slots
        elif self._lead == -self._decisive:
            self._leader = self._forecast
