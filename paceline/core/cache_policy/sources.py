"""The share of each source's hints that come true."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass

LEVELS = 2
"""Levels of belief in a source: 0 if its hints rarely come true."""

_SHARES = (0.2,)
"""Shares of hints that came true at which a higher level begins."""
_PRIOR = 16.0
"""Weight of the assumption that half of the hints of a new source come true, in hinted blocks."""
_WEIGHT = 4096.0
"""When the counts of a source reach this sum, they are halved, so that newer hints weigh more."""
_SOURCES = 1024
"""Most sources to remember. The one that has been silent longest is forgotten first, and counts as new."""


@dataclass(slots=True)
class _Record:
    true: float = 0.0
    all: float = 0.0


class Sources:
    """The record of each source of hints, counted in hinted blocks."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, _Record] = OrderedDict()

    def level(self, source: bytes) -> int:
        """Return how much to believe a hint of this source."""
        record = self._records.get(source, _Record())
        return bisect_right(_SHARES, (record.true + _PRIOR / 2) / (record.all + _PRIOR))

    def count(self, source: bytes, came_true: bool) -> None:
        """Count a hinted block that was requested again, or that was not for a long time."""
        record = self._records.setdefault(source, _Record())
        self._records.move_to_end(source)
        record.true += came_true
        record.all += 1
        if record.all >= _WEIGHT:
            record.true, record.all = record.true / 2, record.all / 2
        if len(self._records) > _SOURCES:
            self._records.popitem(last=False)
