"""A clock that stops while its process is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_GAP_SECONDS = 1.0


class AwakeClock:
    """A clock that counts only the seconds in which this process ran. It has to be called several times a second.

    A process that is stopped, or whose machine sleeps, cannot receive renewals of leases. Such a pause must not make
    leases expire. So at most LONGEST_GAP_SECONDS between two calls are counted.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._left_out = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._left_out += max(0.0, now - self._last - LONGEST_GAP_SECONDS)
        self._last = now
        return now - self._left_out
