"""Policies as users may write them, and helpers that name blocks."""

from __future__ import annotations

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.ranking import Block, Name


def name(text: str) -> Name:
    """Return the name of the last block of the context `text`, in which each letter is a block."""
    return 0, text.encode()


class MostRecent(CachePolicy):
    """A policy that evicts the block offered last. This would be a parent, but all policies evict children first."""

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
    """A policy that always chooses a block that other blocks need."""

    def choose(self) -> Name:
        return name("a")
