"""The newest steps of an engine, from which `paceline profile` learns how long steps take."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.core.step_record import StepRecord
from paceline.engine.step import Step, StepResult

KEPT = 4096
"""Number of steps that are kept: a minute's steps if each takes 15 ms."""


class StepLog:
    """A ring of the newest steps. One thread notes steps; any thread may read.

    Args:
        kept: largest number of steps that are kept.
    """

    def __init__(self, kept: int = KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._ring: list[StepRecord | None] = [None] * kept
        self._noted = 0
        self._clock = clock

    def note(self, step: Step, result: StepResult) -> None:
        """Note a step that was computed. It must be cheap, because the next step may wait for it."""
        prompt_tokens = prompt_pairs = sequences = drafts = context_tokens = 0
        for chunk, outcome in zip(step.chunks, result.chunks, strict=True):
            start, length = chunk.start, chunk.length
            if not chunk.follows:
                prompt_tokens += length
                prompt_pairs += length * start + length * (length + 1) // 2
            elif outcome.tokens:  # otherwise the context has ended, and nothing is computed
                sequences += 1
                drafts += outcome.drafted
                context_tokens += start + length
        what = prompt_tokens, prompt_pairs, sequences, drafts, context_tokens
        number = self._noted
        self._ring[number % len(self._ring)] = StepRecord(number, self._clock(), result.seconds, *what)
        self._noted = number + 1

    def newest(self, most: int) -> list[StepRecord]:
        """Return at most `most` of the newest steps, in order."""
        known = sorted(record for record in self._ring.copy() if record is not None)
        return known[-most:] if most > 0 else []
