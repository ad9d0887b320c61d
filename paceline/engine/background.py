"""The rule that says when requests of the background are computed.

A background request is a request for which no client waits, such as a line of a batch. All other requests are urgent.
While a worker of the host computes urgent requests, requests of the background keep their rows and blocks but are left
out of steps, with two exceptions:

- If the worker has an ITL target, a step takes as many decoding rows of the background as the target leaves time for.
  The number falls by half after a step that was longer than the target, and grows slowly otherwise.
- One step in about 200 takes all requests of the background, so that they are not starved. It delays fewer than one in
  100 urgent tokens.

Workers that share the cores of a host share one word of its memory (`core/turns.py`). The word is the instant until
which one of these workers computes urgent requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.core.turns import URGENT_UNTIL
from paceline.engine.step import Step, StepResult

ALL = 1 << 30
""""All requests of the background": a number larger than the number of requests that a worker can have."""

PAUSE_STEPS = 200
"""While urgent requests run, the background's next step comes after this many times the length of its last step."""
LEAST_PAUSE = 4_000_000_000
"""Least time between two steps with the background while urgent requests run, in nanoseconds."""
CLAIM_STEPS = 4
"""A claim of the cores for urgent requests lasts this many times the length of the last step, because this worker's
next step begins within that time.
"""
LEAST_CLAIM = 50_000_000
"""Least time that a claim lasts, in nanoseconds: long enough for a handoff from prefill to decode."""
GROWTH = 0.02
"""Number of rows by which the background's share of a step grows after each step within the ITL target."""


class BackgroundTurns:
    """Decides how many requests of the background each step of a worker may take.

    Args:
        page: page of memory that workers on the same cores share; None if this worker shares its cores with no other.
        itl_target: target for the length of a step with urgent requests, in seconds; None adds no background rows.
        clock: nanoseconds of the host's monotonic clock.
    """

    def __init__(
        self,
        page: memoryview | None = None,
        itl_target: float | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._words = None if page is None else page.cast("q")
        self._target = itl_target
        self._clock = clock
        self._turn_at: int | None = None
        """Instant at which the background gets a step although urgent requests run, in nanoseconds; None without such
        requests.
        """
        self._step = 0
        """Length of the last step, in nanoseconds."""
        self._own_step = 0
        """Length of the last step that took all of the background, in nanoseconds."""
        self._spare = 0.0
        """Rows of the background that fit into a step with urgent requests."""

    def rows(self, is_urgent: bool) -> int:
        """Return how many requests of the background the next step may take: 0, a few rows that decode, or ALL.

        Args:
            is_urgent: whether this worker has urgent requests.
        """
        now = self._clock()
        if is_urgent and self._words is not None:
            claim = now + max(LEAST_CLAIM, CLAIM_STEPS * self._step)
            self._words[URGENT_UNTIL] = max(self._words[URGENT_UNTIL], claim)
        if not is_urgent and (self._words is None or self._words[URGENT_UNTIL] <= now):
            self._turn_at = None
            return ALL
        pause = max(LEAST_PAUSE, PAUSE_STEPS * self._own_step)
        if self._turn_at is None:
            self._turn_at = now + pause
        if self._turn_at <= now:
            self._turn_at = now + pause
            return ALL
        return int(self._spare) if is_urgent else 0

    def note(self, step: Step, result: StepResult) -> None:
        """Take the length of a computed step into account for the next calls of `rows`."""
        self._step = int(result.seconds * 1e9)
        background = sum(chunk.background for chunk in step.chunks)
        is_mixed = background < len(step.chunks)
        if background > int(self._spare) or not is_mixed:
            self._own_step = self._step if background else self._own_step
            return
        if self._target is not None:
            self._spare = self._spare / 2 if result.seconds > self._target else self._spare + GROWTH
