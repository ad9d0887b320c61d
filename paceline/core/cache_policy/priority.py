"""By the priority of requests, and by what computing a block again costs."""

from __future__ import annotations

from paceline.core.cache_policy.base import Block, CachePolicy, Name
from paceline.core.cache_policy.queue import RankedQueue

LINEAR_TOKENS = 16_384
"""Length of a context at which attention costs about as much as all else that is computed for a token."""


class Priority(CachePolicy):
    """What the least urgent requests used goes first. Among equals, credit decides (GreedyDual; Young, 1994): each use
    gives a block what computing it costs, and each eviction takes from all others what the evicted one had left. So
    blocks deep in a long context stay longer than others, and none for ever.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._queue = RankedQueue()
        self._credit: dict[Name, float] = {}
        self._spent = 0.0

    def inserted(self, block: Block) -> None:
        self._give(block)

    def touched(self, block: Block) -> None:
        self._give(block)

    def released(self, block: Block) -> None:
        self._give(block)

    def gone(self, block: Block, evicted: bool) -> None:
        credit = self._credit.pop(block.name)
        if evicted:
            self._spent = max(self._spent, credit)

    def offer(self, block: Block) -> None:
        self._queue.add(block.name, (-block.priority, self._credit[block.name], block.used))

    def withdraw(self, block: Block) -> None:
        self._queue.discard(block.name)

    def choose(self) -> Name:
        return self._queue.first()

    def _give(self, block: Block) -> None:
        # All are relative to what is spent, so that an eviction need not change the others.
        self._credit[block.name] = self._spent + 1 + block.end_tokens / LINEAR_TOKENS
