"""A clock that stands still while its process does."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_GAP_SECONDS = 1.0


class AwakeClock:
    """Seconds in which this process ran, as long as it is asked several times a second.

    A process that was stopped, or a machine that slept, could not hear the renewals that came meanwhile. What is longer
    than LONGEST_GAP_SECONDS between two calls is therefore left out, so that a standstill takes nobody's lease.

    Args:
        clock: monotonic seconds.
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
