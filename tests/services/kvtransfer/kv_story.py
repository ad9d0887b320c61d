"""What the workers of a lease know and believe, for the state machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.types import Key
from tests.services.kvtransfer.kv_toolkit import chain, make_layout

LAYOUT = make_layout((16, 0), (32, 16))


@dataclass(eq=False)
class Story:
    """One lease as its workers know it, from reservation on."""

    serial: int
    request: str
    context: str
    """One letter for each 16 tokens."""
    tables: list[list[int]]
    words: dict[int, object] = field(default_factory=dict)
    """By slot, what they wrote there or found."""
    sealed: list[int] = field(default_factory=lambda: [0] * len(LAYOUT.groups))
    """How many blocks of each group are."""

    def name(self, group: int, block: int) -> tuple[int, bytes]:
        """What a sealed block contains."""
        return group, chain(self.context)[(block + 1) * LAYOUT.groups[group].block_tokens // 16 - 1]


@dataclass(eq=False)
class Worker:
    """A worker's belief that it may touch the blocks of a lease."""

    story: Story
    session: int
    key: Key
    grace_end: float
    """Until then it may touch them: for ever, unless it let go or its session broke."""
    opened: bool
    """Whether it writes what another one reserved."""
