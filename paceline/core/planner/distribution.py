"""A small histogram of positive numbers, from which percentiles are read. Tokens and seconds use the same buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

_PER_DOUBLING = 8
"""Buckets for each doubling of the value. A bucket is 9 % wide, so its middle is at most 4.5 % off."""
_FIRST, _LAST = -20 * _PER_DOUBLING, 40 * _PER_DOUBLING
"""The first bucket counts all values up to 1e-6, zero included; the last one all values above 1e12."""


@dataclass(slots=True)
class Distribution:
    """Counts of values in buckets of equal ratio, and the exact sum of the values.

    A count may be a fraction, because old values are forgotten by halves.
    """

    counts: dict[int, float] = field(default_factory=dict)
    """Number of values by bucket. Bucket i has the values in (2**((i-1)/8), 2**(i/8)]."""
    total: float = 0.0

    @staticmethod
    def of(values: Iterable[float]) -> Distribution:
        """Return a distribution of these values."""
        made = Distribution()
        for value in values:
            made.add(value)
        return made

    def add(self, value: float, times: float = 1.0) -> None:
        """Count a value `times` times. The value must not be negative."""
        bucket = math.ceil(_PER_DOUBLING * math.log2(value)) if value > 1e-6 else _FIRST
        bucket = min(max(bucket, _FIRST), _LAST)
        self.counts[bucket] = self.counts.get(bucket, 0.0) + times
        self.total += value * times

    def merge(self, other: Distribution) -> None:
        """Add the counts of all values of `other` to this distribution."""
        for bucket, times in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0.0) + times
        self.total += other.total

    @staticmethod
    def merged(parts: Iterable[Distribution]) -> Distribution:
        """Return a distribution of all values in `parts`."""
        whole = Distribution()
        for part in parts:
            whole.merge(part)
        return whole

    def since(self, earlier: Distribution) -> Distribution:
        """Return the values that were added after `earlier`, which is an older copy of this distribution."""
        gained = {bucket: times - earlier.counts.get(bucket, 0.0) for bucket, times in self.counts.items()}
        counts = {bucket: times for bucket, times in gained.items() if times > 0}
        return Distribution(counts, max(0.0, self.total - earlier.total) if counts else 0.0)

    def faded(self, factor: float) -> Distribution:
        """Return a copy in which each value counts `factor` times as much. Counts below 0.001 are dropped."""
        counts = {bucket: times * factor for bucket, times in self.counts.items() if times * factor >= 1e-3}
        return Distribution(counts, self.total * factor if counts else 0.0)

    @property
    def count(self) -> float:
        return math.fsum(self.counts.values())

    @property
    def mean(self) -> float:
        """The exact mean of the values, which sums of work need; 0 if there are no values. Objectives use
        percentiles.
        """
        return self.total / count if (count := self.count) else 0.0

    @property
    def squared_variation(self) -> float:
        """Variance divided by the square of the mean, from the middles of the buckets; 0 if there are no values."""
        middles = [(_middle(bucket), times) for bucket, times in self.counts.items()]
        first = math.fsum(value * times for value, times in middles)
        second = math.fsum(value * value * times for value, times in middles)
        return max(0.0, second * self.count / first**2 - 1) if first else 0.0

    def percentile(self, share: float) -> float:
        """Return the percentile at `share`, such as 0.95, by nearest rank, at most 4.5 % off; 0 without values."""
        wanted, seen = share * self.count - 1e-9, 0.0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= wanted:
                return _middle(bucket)
        return 0.0

    def share_within(self, limit: float) -> float:
        """Return the share of values up to `limit`, whose whole bucket is counted; 1 if there are no values."""
        last = math.ceil(_PER_DOUBLING * math.log2(limit)) if limit > 1e-6 else _FIRST
        count = self.count
        return math.fsum(times for bucket, times in self.counts.items() if bucket <= last) / count if count else 1.0


def _middle(bucket: int) -> float:
    return 0.0 if bucket == _FIRST else float(2 ** ((bucket - 0.5) / _PER_DOUBLING))
