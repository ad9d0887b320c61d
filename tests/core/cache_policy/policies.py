"""Policies as others may write them, and short ways to names."""

from __future__ import annotations

from paceline.core.cache_policy.base import Block, CachePolicy, Name


def name(text: str) -> Name:
    """Of the block behind the context `text`, a letter a block."""
    return 0, text.encode()


class MostRecent(CachePolicy):
    """What was offered last goes first: parents would, were it not for the order that all policies keep."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.offered: dict[Name, None] = {}

    def offer(self, block: Block) -> None:
        self.offered[block.name] = None

    def withdraw(self, block: Block) -> None:
        del self.offered[block.name]

    def choose(self) -> Name:
        return next(reversed(self.offered))


class Stubborn(MostRecent):
    """Wants to evict what others need."""

    def choose(self) -> Name:
        return name("a")
