"""The least-recently-used policy."""

from __future__ import annotations

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.queue import UseQueue
from paceline.core.cache_policy.ranking import Block, Name


class LRU(CachePolicy):
    """Evicts the least recently used block first."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._queue = UseQueue()

    def offer(self, block: Block) -> None:
        self._queue.add(block.name, block.used)

    def withdraw(self, block: Block) -> None:
        self._queue.discard(block.name)

    def choose(self) -> Name:
        return self._queue.first()
