"""The part of a cache policy that decides the order in which blocks are evicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.cache_policy.hints import Hint

Name = tuple[int, bytes]
"""(group, hash) of a block's content."""


class Place(NamedTuple):
    """The position of a block in its context."""

    parent: Name | None = None
    """The block before this one, without which this one cannot be reused. The parent is never evicted before this one.
    """
    end_tokens: int = 0
    """Number of tokens of the context up to the end of the block. A block with more tokens before it costs more to
    compute again.
    """
    priority: int = 0
    """Priority of the request; lower is more urgent, as in the API."""
    partners: tuple[int, ...] = ()
    """Groups whose blocks of the same tokens are needed together with this one, such as the parts of a divided group.
    """


NOWHERE = Place()


@dataclass(slots=True)
class Block:
    """A reusable block. A ranking reads these fields and does not write them."""

    name: Name
    parent: Name | None
    end_tokens: int
    priority: int
    """The most urgent priority of the requests that used the block."""
    partners: tuple[int, ...]
    used: int
    """Time at which the block was last inserted, touched or released, on a clock that counts these events."""
    touches: int = 0
    """Number of requests that found the block in this memory."""
    hint: Hint | None = None
    """The newest hint about the block's next use; None if there was none since its last use."""
    evictable: bool = False
    offered: bool = False
    is_end: bool = False
    """Whether no evictable block needed this one when it was last released."""


class BlockRanking(ABC):
    """Ranks the blocks of one memory. It reads no clock and no random numbers: equal calls have equal results.

    Each block is inserted, then touched, hinted and released any number of times, and then gone. Between `offer` and
    `withdraw`, `choose` may return it.

    Args:
        slots: number of blocks that the memory can hold.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots

    @abstractmethod
    def choose(self) -> Name:
        """Return the name of the offered block to evict next. At least one block is on offer. A call of `withdraw`
        follows.
        """

    @abstractmethod
    def offer(self, block: Block) -> None:
        """Note that a block may be evicted from now on."""

    @abstractmethod
    def withdraw(self, block: Block) -> None:
        """Note that an offered block may no longer be evicted: it is in use, needed by another block, protected, or
        about to be removed.
        """

    def inserted(self, block: Block) -> None:  # noqa: B027 (most rankings need not know)
        """Note that a block was inserted. It is in use until `released` is called."""

    def touched(self, block: Block) -> None:  # noqa: B027
        """Note that a request has found a block. The block is not on offer during this call."""

    def hinted(self, block: Block) -> None:  # noqa: B027
        """Note that `block.hint` is new. The block is not on offer during this call."""

    def released(self, block: Block) -> None:  # noqa: B027
        """Note that no request uses a block any more. The block is not on offer during this call."""

    def gone(self, block: Block, evicted: bool) -> None:  # noqa: B027
        """Note that a block has left the memory.

        Args:
            evicted: whether the block was removed because room was needed.
        """
