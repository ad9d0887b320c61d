"""A priority queue of block names."""

from __future__ import annotations

import heapq
from typing import Any

from paceline.core.cache_policy.ranking import Name


class RankedQueue:
    """Names of blocks, lowest rank first. Names with equal ranks are in order of arrival."""

    def __init__(self) -> None:
        self._serial = 0
        self._heap: list[tuple[Any, int, Name]] = []
        self._live: dict[Name, int] = {}  # serial numbers by name; heap entries with other numbers are void

    def __len__(self) -> int:
        return len(self._live)

    def add(self, name: Name, rank: Any) -> None:
        """Add a name. All ranks in a queue must be comparable with each other."""
        self._serial += 1
        self._live[name] = self._serial
        heapq.heappush(self._heap, (rank, self._serial, name))

    def discard(self, name: Name) -> bool:
        """Remove a name. Return whether it was in the queue."""
        found = self._live.pop(name, None) is not None
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        return found

    def first(self) -> Name:
        """Return the name with the lowest rank. The queue must not be empty."""
        while not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def _is_live(self, entry: tuple[Any, int, Name]) -> bool:
        return self._live.get(entry[2]) == entry[1]
