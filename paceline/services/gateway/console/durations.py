"""A small histogram of durations, from which percentiles are read. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

_LEAST_SECONDS = 1e-4
_PER_DOUBLING = 8
"""Buckets for each doubling of the duration. A bucket is 9 % wide, so its middle is at most 4.5 % off."""
_LAST = 25 * _PER_DOUBLING
"""The last bucket, which also counts longer durations. It begins at 56 minutes."""


class Durations:
    """Counts of durations in buckets of equal ratio. It never has more than 201 entries."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = Counter[int]()

    def add(self, seconds: float) -> None:
        bucket = math.ceil(_PER_DOUBLING * math.log2(seconds / _LEAST_SECONDS)) if seconds > _LEAST_SECONDS else 0
        self._counts[min(bucket, _LAST)] += 1

    @staticmethod
    def merged(parts: Iterable[Durations]) -> Durations:
        """Return a histogram of all durations in `parts`."""
        whole = Durations()
        for part in parts:
            whole._counts.update(part._counts)
        return whole

    @property
    def count(self) -> int:
        return self._counts.total()

    def percentiles(self, *shares: float) -> list[float] | None:
        """Return the duration of each share by nearest rank, in seconds to the microsecond; None if there are none.

        Args:
            shares: ascending numbers above 0 and up to 1, such as 0.5 and 0.99.
        """
        total = self._counts.total()
        if not total:
            return None
        found: list[float] = []
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            while len(found) < len(shares) and seen >= math.ceil(shares[len(found)] * total):
                found.append(round(_LEAST_SECONDS * 2 ** ((bucket - 0.5) / _PER_DOUBLING), 6))
        return found
