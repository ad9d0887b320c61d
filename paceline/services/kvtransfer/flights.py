"""Who brings which prefix into a host's cache and who waits for whom, so that none comes twice at a time. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Caller = TypeVar("Caller", bound=Hashable)


class Flights(Generic[Caller]):
    """Each caller lacks links of its context's chain, and flies, that is, brings them, or waits for one that does."""

    def __init__(self) -> None:
        self._flying: dict[Caller, frozenset[bytes]] = {}
        """Links that each lacked when it began."""
        self._waiting: dict[Caller, Caller] = {}
        """For whom each waits."""

    def ask(self, caller: Caller, lacking: Sequence[bytes]) -> bool:
        """Whether the caller flies now, until `end`. Otherwise it waits until somebody's `end` names it, and asks again
        for what it lacks then.

        Args:
            lacking: the links that are not here, in the order of the chain; who lacks nothing waits for nobody.
        """
        ahead = next((other for other, links in self._flying.items() if lacking and lacking[0] in links), None)
        if ahead is None:
            self._flying[caller] = frozenset(lacking)
            return True
        self._waiting[caller] = ahead
        return False

    def end(self, caller: Caller) -> list[Caller]:
        """The caller has brought what it could, has failed or does not want it any more, in the air or waiting.

        Returns:
            Those who waited for it.
        """
        self._flying.pop(caller, None)
        self._waiting.pop(caller, None)
        woken = [other for other, ahead in self._waiting.items() if ahead == caller]
        for other in woken:
            del self._waiting[other]
        return woken
