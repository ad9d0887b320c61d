"""The base of all cache policies: the known blocks, the needs of blocks for other blocks, and the guarantees of
`evict`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import final

from paceline.core.cache_policy.hints import Hint
from paceline.core.cache_policy.ranking import NOWHERE, Block, BlockRanking, Name, Place


@dataclass(slots=True)
class HintCounts:
    """Numbers of blocks with a hint that came true, and with a hint that did not."""

    hinted: int = 0
    kept: int = 0
    """Hinted blocks that were requested again while they were in this memory."""
    wasted: int = 0
    """Hinted blocks that were evicted before a request used them again."""


class CachePolicy(BlockRanking):
    """Knows the reusable blocks of one memory, and chooses the blocks to evict when room is needed.

    A block is *not yet readable* until it is inserted, *in use* from then on, and *evictable* from `release` until
    `hold`. The final methods give every policy the same guarantees. `evict` removes as many blocks as it was asked for,
    or none. It never removes a block that is protected or in use, and removes a block only after the evictable blocks
    that need it.

    A subclass only ranks blocks. It is offered the blocks that may be evicted, which are evictable and needed by no
    other evictable block, and chooses among them.

    Args:
        slots: number of blocks that the memory can hold.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.hint_counts = HintCounts()
        self._blocks: dict[Name, Block] = {}
        self._dependents: defaultdict[Name, int] = defaultdict(int)  # evictable children, by parent
        self._lost: OrderedDict[Name, None] = OrderedDict()
        """Offered blocks whose parent or partner is missing. They are evicted first."""
        self._evictable = 0
        self._clock = 0

    # ---- operations on blocks

    @final
    def get(self, name: Name) -> Block | None:
        """Return the block with this name; None if the memory has no such block."""
        return self._blocks.get(name)

    @final
    @property
    def evictable(self) -> int:
        """Number of blocks that `evict` could remove."""
        return self._evictable

    @final
    def blocks(self) -> Collection[Block]:
        """Return all blocks that requests could reuse now, in use or not."""
        return self._blocks.values()

    @final
    def insert(self, name: Name, place: Place = NOWHERE) -> None:
        """Add a block that can be read from now on, and mark it as in use. Raises ValueError if the name is known
        already.
        """
        if name in self._blocks:
            raise ValueError(f"{name} is here already")
        self._clock += 1
        block = self._blocks[name] = Block(name, *place, self._clock)
        self.inserted(block)

    @final
    def touch(self, names: Iterable[Name], priority: int | None = None) -> None:
        """Note that a request has found some blocks.

        Args:
            names: names of the blocks, in the order of the request's context.
            priority: priority of the request; None if unknown.
        """
        for name in names:
            block = self._blocks[name]
            offered = self._withdraw(block)
            self._clock += 1
            block.used = self._clock
            block.touches += 1
            if priority is not None and priority < block.priority:
                block.priority = priority
            self.touched(block)
            if block.hint is not None:
                self.hint_counts.kept += 1
                block.hint = None
            if offered:
                self._offer(block)

    @final
    def expect(self, name: Name, hint: Hint) -> None:
        """Note a hint about a block; it replaces an earlier hint. Do nothing if the memory does not have the block."""
        block = self._blocks.get(name)
        if block is None:
            return
        self.hint_counts.hinted += block.hint is None
        offered = self._withdraw(block)
        block.hint = hint
        self.hinted(block)
        if offered:
            self._offer(block)

    @final
    def hold(self, name: Name) -> None:
        """Mark a block as in use."""
        block = self._blocks[name]
        if block.evictable:
            self._pin(block)

    @final
    def release(self, name: Name) -> None:
        """Mark a block as evictable. Children should be released before their parents."""
        block = self._blocks[name]
        if not block.evictable:
            self._clock += 1
            block.used = self._clock
            block.is_end = block.name not in self._dependents
            self.released(block)
            self._unpin(block)

    @final
    def remove(self, name: Name) -> None:
        """Remove a block that cannot be read any more."""
        block = self._blocks[name]
        if block.evictable:
            self._pin(block)
        self._take_out(block)
        self.gone(block, evicted=False)

    @final
    def evict(self, count: int, protected: Iterable[Name] = ()) -> list[Name] | None:
        """Remove `count` blocks to make room, children before their parents. Removes none if fewer are evictable.

        Args:
            count: number of blocks to remove.
            protected: names of blocks to keep, together with all blocks that they need.

        Returns:
            Names of the removed blocks in the order of removal; None if fewer than `count` could be removed.
        """
        kept = self._protect(protected)
        try:
            return None if count > self._evictable else [self._evict() for _ in range(count)]
        finally:
            for block in reversed(kept):
                self._unpin(block)

    # ---- the order of blocks

    def _protect(self, names: Iterable[Name]) -> list[Block]:
        """Pin the named blocks and all blocks that they need. Return the ones of these that were evictable, parents
        first.
        """
        kept: list[Block] = []
        for name in names:
            path = []
            block = self._blocks.get(name)
            while block is not None and block.evictable:
                path.append(block)
                block = None if block.parent is None else self._blocks.get(block.parent)
            for block in reversed(path):
                self._pin(block)
                kept.append(block)
        return kept

    def _evict(self) -> Name:
        name = self._first_lost() or self.choose()
        block = self._blocks.get(name)
        if block is None or not block.offered:
            raise RuntimeError(f"{type(self).__name__} chose {name}, which is not on offer")
        self._pin(block)
        self._take_out(block)
        self.gone(block, evicted=True)
        self.hint_counts.wasted += block.hint is not None
        return name

    def _take_out(self, block: Block) -> None:
        del self._blocks[block.name]
        for group in block.partners:
            partner = self._blocks.get((group, block.name[1]))
            if partner is not None and self._withdraw(partner):
                self._offer(partner)  # the block is lost now

    def _is_lost(self, block: Block) -> bool:
        """Return whether no request can use a block, because its parent or a partner is not here."""
        if block.parent is not None and block.parent not in self._blocks:
            return True
        return bool(block.partners) and any((group, block.name[1]) not in self._blocks for group in block.partners)

    def _first_lost(self) -> Name | None:
        """Return an offered block that no request can use; None if there is none.

        If the block that it lacked has come back, it is offered to the subclass instead.
        """
        while self._lost:
            name = next(iter(self._lost))
            block = self._blocks[name]
            if self._is_lost(block):
                return name
            del self._lost[name]
            self.offer(block)
        return None

    def _pin(self, block: Block) -> None:
        block.evictable = False
        self._evictable -= 1
        self._withdraw(block)
        if block.parent is not None:
            if self._dependents[block.parent] > 1:
                self._dependents[block.parent] -= 1
                return
            del self._dependents[block.parent]
            parent = self._blocks.get(block.parent)
            if parent is not None and parent.evictable:
                self._offer(parent)

    def _unpin(self, block: Block) -> None:
        block.evictable = True
        self._evictable += 1
        if block.parent is not None:
            self._dependents[block.parent] += 1
            parent = self._blocks.get(block.parent)
            if parent is not None:
                self._withdraw(parent)
        if block.name not in self._dependents:
            self._offer(block)

    def _offer(self, block: Block) -> None:
        block.offered = True
        if self._is_lost(block):
            self._lost[block.name] = None
        else:
            self.offer(block)

    def _withdraw(self, block: Block) -> bool:
        """Withdraw a block from those that may be evicted. Return whether it was one of them."""
        if not block.offered:
            return False
        block.offered = False
        if block.name in self._lost:
            del self._lost[block.name]
        else:
            self.withdraw(block)
        return True

    # ---- self-check

    @final
    def check(self) -> list[str]:
        """Check the counts of this class and return one sentence for each fault."""
        wrong = []
        evictable = [block for block in self._blocks.values() if block.evictable]
        if len(evictable) != self._evictable:
            wrong.append(f"{len(evictable)} blocks are evictable, the policy counts {self._evictable}")
        dependents = Counter(block.parent for block in evictable if block.parent is not None)
        if dependents != self._dependents:
            wrong.append("the policy miscounts which blocks need which")
        on_offer = {block.name for block in evictable if block.name not in dependents}
        if on_offer != {block.name for block in self._blocks.values() if block.offered}:
            wrong.append("a block is on offer that must not be evicted, or a block that may be is not on offer")
        return wrong
