"""What two workers do to each other when they take turns on the same cores, from steps of both at the same time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from paceline.core.step_record import StepRecord
from paceline.core.step_times import StepTimes, Turns

_LEAST_SHARE = 0.2
"""Share of a prompt's step during which decode must have computed, or the step tells nothing about it."""


def find_turns(
    itl_target: float,
    prompts: Sequence[StepRecord],
    decoding: Sequence[StepRecord],
    prefill: StepTimes,
    decode: StepTimes,
) -> Turns:
    """Return how workers take turns.

    Args:
        itl_target: the target that the workers were given, in seconds; 0 if none was given.
        prompts, decoding: steps at the same time, of workers with one clock.
        prefill, decode: how long such steps take alone.
    """
    turns = Turns(itl_target=itl_target, least_share=0.5) if itl_target else Turns()
    progress, longer = [], []
    for row in prompts:
        taken = sum(_common(row, other) for other in decoding)
        if taken >= _LEAST_SHARE * row.seconds:
            alone = prefill.prefill_seconds(row.prompt_tokens, row.prompt_pairs - row.prompt_tokens / 2)
            # What is not computed in the time that is left was computed while decode computed.
            progress.append((alone - (row.seconds - taken)) / taken)
    for row in decoding:
        if sum(_common(row, other) for other in prompts) > 0.5 * row.seconds:
            longer.append(row.seconds / decode.decode_seconds(row.sequences + row.drafts, row.context_tokens))
    return turns.model_copy(
        update={
            "overlap": min(1.0, max(0.0, statistics.median(progress))) if progress else 0.0,
            "slowdown": max(1.0, statistics.median(longer)) if longer else 1.0,
        }
    )


def _common(one: StepRecord, other: StepRecord) -> float:
    """Return the seconds that two steps have in common."""
    return max(0.0, min(one.ended, other.ended) - max(one.ended - one.seconds, other.ended - other.seconds))
