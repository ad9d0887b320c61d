"""The record of one step of a worker. The worker's engine writes it, and `paceline profile` learns from it."""

from __future__ import annotations

from typing import NamedTuple


class StepRecord(NamedTuple):
    """One step: the work that it computed, and its duration."""

    number: int
    """Number of the step among all steps of the engine, from 0."""
    ended: float
    """Instant at which the step's result was known, in seconds on the worker's monotonic clock. Compare it only with
    other instants of the same worker.
    """
    seconds: float
    prompt_tokens: int
    """Number of prompt tokens that the step computed."""
    prompt_pairs: int
    """Sum, over the prompt tokens of the step, of the number of tokens to which each attends, itself included.
    """
    sequences: int
    """Number of sequences that decoded in this step: each got at least one token after its prompt."""
    drafts: int
    """Draft tokens that this step verified, over all its sequences."""
    context_tokens: int
    """Number of tokens that the decoding sequences attend to, summed over these sequences."""
