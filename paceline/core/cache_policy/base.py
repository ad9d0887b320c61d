"""What every cache policy has in common: the blocks, who needs whom, and that `evict` keeps its word."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, final

Name = tuple[int, bytes]
"""(group, hash) of a block's content."""


class Place(NamedTuple):
    """Where a block stands in the context that it is of."""

    parent: Name | None = None
    """The block without which it is of no use: it is never evicted after that one."""
    end_tokens: int = 0
    """Tokens of the context up to its end: what computing it again costs grows with them."""
    priority: int = 0
    """Of the request; a lower one is more urgent, as in the API."""


NOWHERE = Place()


@dataclass(slots=True)
class Block:
    """One block that can be found, for policies to read."""

    name: Name
    parent: Name | None
    end_tokens: int
    priority: int
    """The most urgent one of the requests that used it."""
    used: int
    """When it was last inserted, touched or released, on a clock that counts such events."""
    touches: int = 0
    """Requests that found it here."""
    evictable: bool = False
    offered: bool = False


class CachePolicy(ABC):
    """Keeps the blocks of one memory that can be found, and says which are to go when room is needed.

    A block is *not yet readable* until it is inserted, *in use* from then on, and *evictable* from `release` until
    `hold`. What is final here is so for every policy: `evict` gives all that was asked for or nothing, never a block
    that is protected or in use, and never one before those evictable ones that need it.

    A policy only ranks. It is offered the blocks that may go, which are evictable and needed by no other evictable
    block, and chooses among them. It has no clock and no chance: equal calls have equal results.

    Args:
        slots: blocks of the memory.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._blocks: dict[Name, Block] = {}
        self._dependents: defaultdict[Name, int] = defaultdict(int)  # evictable children, by parent
        self._lost: dict[Name, None] = {}  # those on offer whose parent is not here: they go first
        self._evictable = 0
        self._clock = 0

    # ---- what a policy decides

    @abstractmethod
    def choose(self) -> Name:
        """Of the blocks on offer, of which there is at least one, that which is to go next. `withdraw` follows."""

    @abstractmethod
    def offer(self, block: Block) -> None:
        """The block may go from now on."""

    @abstractmethod
    def withdraw(self, block: Block) -> None:
        """The block is not on offer any more: it is in use, needed by another one, protected, or has gone."""

    def inserted(self, block: Block) -> None:  # noqa: B027 (most policies learn nothing from it)
        """The block is new; it is in use."""

    def touched(self, block: Block) -> None:  # noqa: B027
        """A request has found the block. It is not on offer meanwhile."""

    def released(self, block: Block) -> None:  # noqa: B027
        """Nobody uses the block any more. It has not been offered yet."""

    def gone(self, block: Block, evicted: bool) -> None:  # noqa: B027
        """The block is not here any more.

        Args:
            evicted: whether that is because room was needed.
        """

    # ---- what is done with blocks

    @final
    def get(self, name: Name) -> Block | None:
        return self._blocks.get(name)

    @final
    def is_needed(self, block: Block) -> bool:
        """Whether there is an evictable block that needs this one."""
        return block.name in self._dependents

    @final
    @property
    def evictable(self) -> int:
        """Blocks that `evict` could give."""
        return self._evictable

    @final
    def blocks(self) -> Collection[Block]:
        """All that can be found."""
        return self._blocks.values()

    @final
    def insert(self, name: Name, place: Place = NOWHERE) -> None:
        """A block can be read from now on; it is in use."""
        if name in self._blocks:
            raise ValueError(f"{name} is here already")
        self._clock += 1
        block = self._blocks[name] = Block(name, *place, self._clock)
        self.inserted(block)

    @final
    def touch(self, names: Iterable[Name], priority: int | None = None) -> None:
        """A request has found these blocks, in the order of its context.

        Args:
            priority: of the request; None where it is not known.
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
            if offered:
                self._offer(block)

    @final
    def hold(self, name: Name) -> None:
        """A block is in use from now on."""
        block = self._blocks[name]
        if block.evictable:
            self._pin(block)

    @final
    def release(self, name: Name) -> None:
        """A block is evictable from now on. Children should be released before their parents."""
        block = self._blocks[name]
        if not block.evictable:
            self._clock += 1
            block.used = self._clock
            self.released(block)
            self._unpin(block)

    @final
    def remove(self, name: Name) -> None:
        """A block cannot be read any more."""
        block = self._blocks[name]
        if block.evictable:
            self._pin(block)
        del self._blocks[name]
        self.gone(block, evicted=False)

    @final
    def evict(self, count: int, protected: Iterable[Name] = ()) -> list[Name] | None:
        """Makes room: removes `count` blocks, children before their parents, or none.

        Args:
            protected: blocks that stay, and with them all that they need.

        Returns:
            Those that have gone, in this order; None where fewer could have.
        """
        kept = self._protect(protected)
        try:
            return None if count > self._evictable else [self._evict() for _ in range(count)]
        finally:
            for block in reversed(kept):
                self._unpin(block)

    # ---- the order of blocks

    def _protect(self, names: Iterable[Name]) -> list[Block]:
        """Those that were evictable, parents before children."""
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
        del self._blocks[name]
        self.gone(block, evicted=True)
        return name

    def _first_lost(self) -> Name | None:
        """One that nobody can make use of. Where its parent came back it is on offer like others."""
        while self._lost:
            name = next(iter(self._lost))
            block = self._blocks[name]
            if block.parent not in self._blocks:
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
        if not self.is_needed(block):
            self._offer(block)

    def _offer(self, block: Block) -> None:
        block.offered = True
        if block.parent is None or block.parent in self._blocks:
            self.offer(block)
        else:
            self._lost[block.name] = None

    def _withdraw(self, block: Block) -> bool:
        """Whether it was on offer."""
        if not block.offered:
            return False
        block.offered = False
        if block.name in self._lost:
            del self._lost[block.name]
        else:
            self.withdraw(block)
        return True

    # ---- the proof

    @final
    def check(self) -> list[str]:
        """Proves what is counted here; returns a sentence for everything that is wrong."""
        wrong = []
        evictable = [block for block in self._blocks.values() if block.evictable]
        if len(evictable) != self._evictable:
            wrong.append(f"{len(evictable)} blocks are evictable, the policy counts {self._evictable}")
        dependents = Counter(block.parent for block in evictable if block.parent is not None)
        if dependents != self._dependents:
            wrong.append("the policy miscounts which blocks need which")
        on_offer = {block.name for block in evictable if block.name not in dependents}
        if on_offer != {block.name for block in self._blocks.values() if block.offered}:
            wrong.append("blocks are on offer that must not go, or such are not that may")
        return wrong
