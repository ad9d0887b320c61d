"""What the workers of a lease know and believe, for the state machine of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.types import Key
from tests.services.kvtransfer.kv_toolkit import chain, make_layout

LAYOUT = make_layout((16, 0), (32, 16))


@dataclass(eq=False)
class Story:
    """One lease as its workers know it, from its reservation on."""

    serial: int
    request: str
    context: str
    """One letter for each 16 tokens."""
    tables: list[list[int]]
    words: dict[int, object] = field(default_factory=dict)
    """By slot, the word that the workers wrote or found there."""
    sealed: list[int] = field(default_factory=lambda: [0] * len(LAYOUT.groups))
    """Number of sealed blocks of each group."""

    def name(self, group: int, block: int) -> tuple[int, bytes]:
        """Return the word that a sealed block contains: its group and hash."""
        return group, chain(self.context)[(block + 1) * LAYOUT.groups[group].block_tokens // 16 - 1]


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
