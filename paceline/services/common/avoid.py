"""A set of keys, such as links, that failed recently and are avoided for a while."""

from __future__ import annotations

import random
import time
from typing import Generic, TypeVar

K = TypeVar("K")


class Avoided(Generic[K]):
    """Keys, such as links, that are avoided for a random time after a failure. Random times prevent that all processes
    which saw the same failure try again at once.

    Args:
        seconds: shortest and longest time for which a key is avoided, in seconds.
    """

    def __init__(self, seconds: tuple[float, float]) -> None:
        self._seconds = seconds
        self._until: dict[K, float] = {}
        """Time at which each key may be tried again, on time.monotonic()."""

    def add(self, key: K) -> None:
        self._until[key] = time.monotonic() + random.uniform(*self._seconds)

    def now(self) -> frozenset[K]:
        """Return the keys to avoid at this moment."""
        now = time.monotonic()
        self._until = {key: until for key, until in self._until.items() if until > now}
        return frozenset(self._until)
