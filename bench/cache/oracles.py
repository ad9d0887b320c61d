"""Cache policies that know the requests to come. They show what a policy could gain at most."""

from __future__ import annotations

import heapq
import itertools
import sys
from collections import OrderedDict, defaultdict, deque

from bench.cache.traces import Trace
from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.forecast import Forecast
from paceline.core.cache_policy.ranking import Block, Name


def name_of(block: int) -> Name:
    """Return the name that a trace's block has in a replay."""
    return 0, block.to_bytes(16, "big")


class Future:
    """The requests that need each block, in order.

    Args:
        trace: the trace that `replay` gets.
    """

    def __init__(self, trace: Trace) -> None:
        self._needed: defaultdict[Name, deque[int]] = defaultdict(deque)
        for index, blocks in enumerate(trace):
            for block in blocks:
                self._needed[name_of(block)].append(index)

    def pass_use(self, name: Name) -> None:
        self._needed[name].popleft()

    def next_use(self, name: Name) -> int:
        """Return the index of the next request that needs the block, or `sys.maxsize` if none does."""
        return self._needed[name][0] if self._needed[name] else sys.maxsize


Ranked = tuple[int, int, int, Name]
"""The rank of a block, lower is evicted first: minus the next use, minus the end in its context, time of the offer."""


class Belady(CachePolicy):
    """The optimal policy. It evicts the block that is needed last or never."""

    def __init__(self, slots: int, trace: Trace) -> None:
        super().__init__(slots)
        self._offered: dict[Name, Ranked] = {}
        self._heap: list[Ranked] = []  # with entries of blocks that are not on offer any more
        self._future = Future(trace)
        self._serial = itertools.count()

    def inserted(self, block: Block) -> None:
        self._future.pass_use(block.name)

    def touched(self, block: Block) -> None:
        self._future.pass_use(block.name)

    def offer(self, block: Block) -> None:
        # Among equals, such as all blocks that are never needed again, evict the end of a context first.
        rank = (-self._future.next_use(block.name), -block.end_tokens, next(self._serial), block.name)
        self._offered[block.name] = rank
        heapq.heappush(self._heap, rank)

    def withdraw(self, block: Block) -> None:
        del self._offered[block.name]

    def choose(self) -> Name:
        while self._offered.get(self._heap[0][-1]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][-1]


class Returning(Forecast):
    """A policy that knows which blocks are needed again, but not when. It evicts all other blocks first.

    The gap to Belady shows the gain from knowing the times.
    """

    def __init__(self, slots: int, trace: Trace) -> None:
        super().__init__(slots)
        self._useless: OrderedDict[Name, None] = OrderedDict()
        self._future = Future(trace)

    def inserted(self, block: Block) -> None:
        self._future.pass_use(block.name)
        super().inserted(block)

    def touched(self, block: Block) -> None:
        self._future.pass_use(block.name)
        super().touched(block)

    def offer(self, block: Block) -> None:
        if self._future.next_use(block.name) == sys.maxsize:
            self._useless[block.name] = None
        else:
            super().offer(block)

    def withdraw(self, block: Block) -> None:
        if block.name in self._useless:
            del self._useless[block.name]
        else:
            super().withdraw(block)

    def choose(self) -> Name:
        return next(iter(self._useless)) if self._useless else super().choose()
