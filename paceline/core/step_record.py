"""The record of one step of a worker. The worker's engine writes it, and `paceline profile` learns from it."""

from __future__ import annotations

from typing import NamedTuple


class StepRecord(NamedTuple):
    """One step: the work that it computed, and its duration."""

    number: int
    """Number of the step among all steps of the engine, from 0."""
    ended: float
    """Instant at which the step's result was known, in seconds on the worker's monotonic clock. Only differences
    between steps mean something."""
    seconds: float
    prompt_tokens: int
    """Tokens of prompts that it computed."""
    prompt_pairs: int
    """Sum over these tokens of the tokens that each of them attends to, itself included."""
    sequences: int
    """Sequences that got a token after their prompt."""
    drafts: int
    """Draft tokens that this step verified, over all its sequences."""
    context_tokens: int
    """Sum over these sequences of the tokens that each of them attends to."""
