"""What the workers of a lease know and believe, for the state machine of the ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.context import Tail
from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.core.types import Key
from tests.services.kvtransfer.kv_toolkit import chain, make_layout

LAYOUT = make_layout((16, 0), (32, 16), encoding_tokens=32)


def tail_of(context: str, letters: int) -> Tail:
    """Return the tail 5 tokens after the first `letters` letters of a context."""
    name = hashlib.md5(f"{context[: letters + 1]} in part".encode()).digest()
    return Tail(16 * letters + 5, name)


@dataclass(eq=False)
class Story:
    """One lease as its workers know it, from its reservation on."""

    serial: int
    request: str
    context: str
    """One letter for each 16 tokens."""
    tables: list[list[int]]
    layout: KVLayout
    """The part of LAYOUT to which the blocks belong."""
    words: dict[int, object] = field(default_factory=dict)
    """By slot, the word that the workers wrote or found there."""
    sealed: list[int] = field(init=False)
    """Number of sealed blocks of each group."""

    def __post_init__(self) -> None:
        self.sealed = [0] * len(self.layout.groups)

    def name(self, group: int, block: int) -> tuple[int, bytes]:
        """Return the word that a sealed block contains: the number of its group, and its hash."""
        link = (block + 1) * self.layout.groups[group].block_tokens // 16 - 1
        return self.layout.first_group + group, chain(self.context)[link]

    def can_write(self, blocks: Sequence[int]) -> bool:
        """Return whether the workers may write into a block of each group, given by its index."""
        return all(
            sealed <= block < len(table) and table[block] != NO_SLOT
            for table, block, sealed in zip(self.tables, blocks, self.sealed)
        )


@dataclass(eq=False)
class Worker:
    """A worker that believes that it may touch the blocks of a lease."""

    story: Story
    session: int
    key: Key
    grace_end: float
    """Time until which it may touch them. Infinite, unless its session is lost."""
    opened: bool
    """Whether it opened the lease, which another worker had reserved."""
