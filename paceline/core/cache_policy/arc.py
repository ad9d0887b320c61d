"""The adaptive replacement cache, ARC (Megiddo and Modha, FAST 2003)."""

from __future__ import annotations

from collections import OrderedDict

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.lru import UseQueue
from paceline.core.cache_policy.ranking import Block, Name


class ARC(CachePolicy):
    """Divides the memory between blocks that were used once and blocks that were used more often.

    The policy remembers evicted names. If an evicted block comes back, the share of its kind grows.

    Args:
        slots: number of blocks that the memory can hold.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.target = 0.0
        """Wanted number of blocks that were used once."""
        self._once = set[Name]()
        self._once_offered = UseQueue()
        self._often_offered = UseQueue()
        self._once_gone: OrderedDict[Name, None] = OrderedDict()  # names of evicted blocks, oldest first
        self._often_gone: OrderedDict[Name, None] = OrderedDict()

    def inserted(self, block: Block) -> None:
        name = block.name
        if name in self._once_gone:
            step = max(1.0, len(self._often_gone) / len(self._once_gone))
            self.target = min(self.target + step, float(self.slots))
            del self._once_gone[name]
        elif name in self._often_gone:
            step = max(1.0, len(self._once_gone) / len(self._often_gone))
            self.target = max(self.target - step, 0.0)
            del self._often_gone[name]
        else:
            self._once.add(name)

    def touched(self, block: Block) -> None:
        self._once.discard(block.name)

    def gone(self, block: Block, evicted: bool) -> None:
        once = block.name in self._once
        self._once.discard(block.name)
        if not evicted:
            return
        if once:
            self._once_gone[block.name] = None
            while len(self._once) + len(self._once_gone) > self.slots and self._once_gone:
                self._once_gone.popitem(last=False)
        else:
            self._often_gone[block.name] = None
            while len(self._once_gone) + len(self._often_gone) > self.slots:
                (self._often_gone or self._once_gone).popitem(last=False)

    def offer(self, block: Block) -> None:
        queue = self._once_offered if block.name in self._once else self._often_offered
        queue.add(block.name, block.used)

    def withdraw(self, block: Block) -> None:
        if not self._once_offered.discard(block.name):
            self._often_offered.discard(block.name)

    def choose(self) -> Name:
        once, often = self._once_offered, self._often_offered
        if once and (not often or len(self._once) > self.target):
            return once.first()
        return often.first()
