"""A cache policy by the priority of requests and the cost of recomputing a block."""

from __future__ import annotations

from paceline.core.cache_policy.base import Block, CachePolicy, Name
from paceline.core.cache_policy.queue import RankedQueue

LINEAR_TOKENS = 16_384
"""Context length at which attention costs about as much as the rest of the computation for a token."""


class Priority(CachePolicy):
    """Evicts the blocks of the least urgent requests first. Among equal priorities, the least credit goes first.

    Credit follows GreedyDual (Young, 1994). Each use sets a block's credit to the cost of computing the block. Each
    eviction takes the credit that the evicted block had left from all others. So blocks deep in a long context stay
    longer than others, but no block stays forever.
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
        # Credits include the credit spent so far, so that an eviction need not change the other blocks.
        self._credit[block.name] = self._spent + 1 + block.end_tokens / LINEAR_TOKENS
