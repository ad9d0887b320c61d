"""The times around steps, from the traces of requests that ran alone. Pure functions.

A gateway's trace has instants of the gateway, and a worker's durations. What lies between the end of a worker's step
and the gateway's instant is not known apart from what lies before the step. It is split into equal halves. Only their
sum matters to a request that runs alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import UnavailableError
from paceline.core.step_times import Delay
from paceline.profiler.fit import spread_of
from paceline.profiler.stack import Answer

Traced = tuple[Answer, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Overheads:
    """Delays of `Profile`, and how long requests join their workers."""

    gateway: Delay
    admit: Delay
    first_token: Delay
    handoff: Delay
    token: Delay
    prefill_join: Delay
    decode_join: Delay


def find_overheads(singles: Sequence[Traced], texts: Sequence[Traced], decode_step: float) -> Overheads:
    """Return the overheads.

    Args:
        singles, texts: requests that ran alone, with token ids and with texts; at least one of the first.
        decode_step: time of a decode step with one sequence, in seconds.

    Raises UnavailableError if no request ran undisturbed.
    """
    parts = [part for part in map(_parts, singles) if part is not None]
    if not parts:
        raise UnavailableError("every request of the profile was moved or retried; profile a stack that stays as it is")
    base = statistics.median(part["asked"] for part in parts)
    spoken = [part for part in map(_parts, texts) if part is not None]
    longest = max(spoken, key=lambda part: part["tokens"], default=None)
    per_token = max(0.0, longest["asked"] - base) / longest["tokens"] if longest else 0.0
    after_step = [max(0.0, part["first"] - part["admitted"] - part["steps"]) / 2 for part in parts]
    # A second token comes one decode step after the handoff; the rest is the way there and back.
    handed = [part for part in parts if part["told"] is not None and part["second"] is not None]
    around = [max(0.0, part["second"] - part["told"] - decode_step) / 2 for part in handed]
    told = [
        max(0.0, part["told"] - part["first"]) + half
        for part, half in zip(parts, after_step)
        if part["told"] is not None
    ]
    return Overheads(
        gateway=_delay([part["asked"] for part in parts]).model_copy(update={"per_token": per_token}),
        admit=_delay([part["admitted"] - part["asked"] for part in parts]),
        first_token=_delay([half + part["client"] for part, half in zip(parts, after_step)]),
        handoff=_delay(told),
        token=_delay(around),
        prefill_join=_delay(after_step),
        decode_join=_delay(around),
    )


def _parts(traced: Traced) -> dict[str, Any] | None:
    """Return the instants of a request in seconds from its arrival; None if it did not run in one attempt."""
    answer, trace = traced
    (part,) = trace["parts"]
    attempts = part["attempts"]
    if len(attempts) != 1 or not attempts[0]["admission"] or not attempts[0]["prefill"] or not answer.token_times:
        return None
    (attempt,) = attempts
    handoff, decode = attempt["handoff"], attempt["decode"]
    first = attempt["first_token_ms"] / 1000
    return {
        "tokens": part["prompt_tokens"],
        "asked": attempt["admission"]["asked_ms"] / 1000,
        "admitted": attempt["admission"]["at_ms"] / 1000,
        "steps": attempt["prefill"]["steps_ms"] / 1000,
        "first": first,
        # What the client sees beyond what the gateway sees: the way to the gateway and back.
        "client": max(0.0, answer.token_times[0] - first),
        "told": handoff["told_ms"] / 1000 if handoff and handoff["told_ms"] is not None else None,
        "second": decode["first_token_ms"] / 1000 if decode else None,
    }


def _delay(seconds: Iterable[float]) -> Delay:
    """Return a delay with the median and the distribution of these times."""
    times = list(seconds)
    middle = statistics.median(times) if times else 0.0
    if middle <= 0:
        return Delay(seconds=max(middle, 0.0))
    return Delay(seconds=middle, spread=spread_of([each / middle for each in times]))
