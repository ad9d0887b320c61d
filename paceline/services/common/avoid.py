"""What has failed recently and is left out for a while."""

from __future__ import annotations

import random
import time
from typing import Generic, TypeVar

K = TypeVar("K")


class Avoided(Generic[K]):
    """Keys that are left out until their time is over; then they are tried again.

    Each time is drawn at random, so that several processes that saw one failure do not all try again at once.

    Args:
        seconds: the shortest and the longest time for which a key is avoided.
    """

    def __init__(self, seconds: tuple[float, float]) -> None:
        self._seconds = seconds
        self._until: dict[K, float] = {}
        """When each key may be tried again, on time.monotonic()."""

    def add(self, key: K) -> None:
        self._until[key] = time.monotonic() + random.uniform(*self._seconds)

    def now(self) -> frozenset[K]:
        """Return the keys to leave out at this moment."""
        now = time.monotonic()
        self._until = {key: until for key, until in self._until.items() if until > now}
        return frozenset(self._until)
