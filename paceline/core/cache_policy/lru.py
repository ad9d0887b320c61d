"""The least-recently-used policy."""

from __future__ import annotations

from bisect import bisect_left, insort

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.ranking import Block, Name

_SPAN_BITS = 5
"""A span is 32 ticks of the policy's clock, so `first` looks at 32 names at most."""


class UseQueue:
    """Names of blocks, least recently used first. The time of a call does not grow with the number of names.

    Names can be added in any order, because an old block can become evictable at any time.
    """

    def __init__(self) -> None:
        self._used: dict[Name, int] = {}
        self._spans: dict[int, dict[int, Name]] = {}  # names by time of last use, for each span of time
        self._order: list[int] = []  # spans that have names, ascending

    def __len__(self) -> int:
        return len(self._used)

    def add(self, name: Name, used: int) -> None:
        """Add a name that is not in the queue. No two names have the same time of last use."""
        self._used[name] = used
        span = used >> _SPAN_BITS
        if span not in self._spans:
            self._spans[span] = {}
            insort(self._order, span)
        self._spans[span][used] = name

    def discard(self, name: Name) -> bool:
        """Remove a name. Return whether it was in the queue."""
        used = self._used.pop(name, None)
        if used is None:
            return False
        span = used >> _SPAN_BITS
        names = self._spans[span]
        del names[used]
        if not names:
            del self._spans[span]
            del self._order[bisect_left(self._order, span)]
        return True

    def first(self) -> Name:
        """Return the least recently used name. The queue must not be empty."""
        names = self._spans[self._order[0]]
        return names[min(names)]


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
