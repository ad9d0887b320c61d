"""Hints that have come before their blocks. Pure."""

from __future__ import annotations

from paceline.core.cache_policy.hints import Hint
from paceline.core.cache_policy.ranking import Name

EARLY_SECONDS = 5.0
"""Longest time that a hint waits for its block. A block that comes later belongs to another request, which has its own
hints.
"""
MOST_EARLY = 1 << 16
"""Largest number of hints that wait. The oldest are dropped first, because a hint is no promise."""


class EarlyHints:
    """Hints about blocks that are not readable yet.

    A decode worker publishes the last blocks of a request after it has sent the last token, so on a busy host the
    gateway's hints may be faster. All methods take `now`, in seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self._waiting: dict[Name, tuple[Hint, float]] = {}  # each with the time at which it came, oldest first

    def put(self, name: Name, hint: Hint, now: float) -> None:
        """Keep a hint until its block comes. It replaces an earlier hint about the same block."""
        self._waiting.pop(name, None)
        self._waiting[name] = hint, now
        if len(self._waiting) > MOST_EARLY:
            del self._waiting[next(iter(self._waiting))]

    def take(self, name: Name, now: float) -> Hint | None:
        """Remove and return the hint about a block that has become readable; None if there is none."""
        self._drop_old(now)
        hint, _ = self._waiting.pop(name, (None, now))
        return hint

    def _drop_old(self, now: float) -> None:
        while self._waiting and now - self._waiting[oldest := next(iter(self._waiting))][1] > EARLY_SECONDS:
            del self._waiting[oldest]
