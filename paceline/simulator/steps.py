"""The steps of a simulated worker: the work of each, and the time that it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.step_times import WorkerTimes
from paceline.engine.chunk_planner import LAST_CHUNK_TOKENS
from paceline.engine.prompt_order import PromptOrder, piece_of
from paceline.simulator.sequence import Sequence
from paceline.simulator.series import Ratios, Yields


@dataclass(frozen=True, slots=True)
class Kit:
    """The times and random series that all workers of one role have in common."""

    times: WorkerTimes
    prompts: Ratios
    decoding: Ratios
    yields: Yields


@dataclass(slots=True)
class Run:
    """Consecutive steps of a worker with the same sequences."""

    begin: float
    """Simulated instant at which the first step began."""
    index: int
    """Number of the first step, counted over all steps of the worker."""
    steps: int
    ratios: Ratios
    first: float
    """Seconds of the first step, before it is multiplied by its ratio."""
    growth: float
    """Seconds by which each step is longer than the one before it."""
    chunks: list[tuple[Sequence, int]]
    """Prompts of the step, with the number of tokens of each. A run with prompts has only one step."""
    rows: int
    """Number of decoding sequences in each step."""
    context: float
    """Number of context tokens that the first step reads for the decoding sequences."""
    by_group: dict[str, int]
    """Number of decoding sequences by class of requests."""
    joined: list[Sequence]
    """Sequences that decode in these steps for the first time."""
    is_long: bool
    """Whether the next step is planned only after this one has ended; see `engine/prompt_order.py`."""
    waited: float
    """Seconds from the end of the previous step to the beginning of the first one; 0 if all rows have just joined."""

    def seconds(self, steps: int) -> float:
        """Return the time of the first `steps` steps, in seconds."""
        return self.ratios.seconds(self.index, steps, self.first, self.growth)

    def gaps(self) -> NDArray[np.float64]:
        """Return, for each step, the time between its tokens and the tokens before them, for rows that have not just
        joined.
        """
        gaps = (self.first + self.growth * np.arange(self.steps)) * self.ratios.values(self.index, self.steps)
        gaps[0] += self.waited
        return gaps


def plan_prompts(
    waiting: Iterable[Sequence], order: PromptOrder, budget: int, tokens_per_second: float, now: float
) -> list[tuple[Sequence, int]]:
    """Return the prompts of the next step and the number of tokens of each, as `Scheduler.plan` chooses them.

    Args:
        waiting: prompts in the order of their arrival.
        budget: largest number of prompt tokens in the step.
        tokens_per_second: measured rate at which prompts are computed; 0 if it is unknown.
        now: the simulated instant, in seconds.
    """
    chunks: list[tuple[Sequence, int]] = []

    def take(sequence: Sequence, tokens: int) -> int:
        left = sequence.left_len
        if sequence.changes_hosts and left > 2 * LAST_CHUNK_TOKENS:
            left -= LAST_CHUNK_TOKENS
        length = piece_of(left, tokens)
        chunks.append((sequence, length))
        return length

    order.share(waiting, budget, tokens_per_second, take, now)
    return chunks
