"""A register of the callers that bring prefixes into a host's cache, so that no two bring the same prefix at the same
time. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Caller = TypeVar("Caller", bound=Hashable)


class Flights(Generic[Caller]):
    """Callers that lack blocks of their contexts on this host. A caller fetches its blocks, or waits for another caller
    that fetches the first of these blocks."""

    def __init__(self) -> None:
        self._flying: dict[Caller, frozenset[bytes]] = {}
        """For each caller that brings links, the links that it lacked when it began."""
        self._waiting: dict[Caller, Caller] = {}
        """For each waiting caller, the caller for which it waits."""

    def ask(self, caller: Caller, lacking: Sequence[bytes]) -> bool:
        """Return whether the caller may bring its links now, until it calls `end`.

        If not, another caller is bringing the first of these links. Then the caller waits until the `end` of another
        caller returns it, and asks again with the links that it still lacks.

        Args:
            lacking: the links that are not cached here, in the order of the chain. If it is empty, the answer is True.
        """
        ahead = next((other for other, links in self._flying.items() if lacking and lacking[0] in links), None)
        if ahead is None:
            self._flying[caller] = frozenset(lacking)
            return True
        self._waiting[caller] = ahead
        return False

    def end(self, caller: Caller) -> list[Caller]:
        """Remove a caller whose fetch has ended, however it ended, or that no longer waits for another caller's fetch.

        Returns:
            The callers that waited for the removed caller. They have to ask again.
        """
        self._flying.pop(caller, None)
        self._waiting.pop(caller, None)
        woken = [other for other, ahead in self._waiting.items() if ahead == caller]
        for other in woken:
            del self._waiting[other]
        return woken
