"""The times around steps, from the traces of requests that ran alone. Pure functions.

A gateway's trace has instants on the gateway's clock, but only durations from workers. So the time before a worker's
step and the time from the step's end to the gateway's next instant cannot be measured apart; only their sum is known.
The sum is split into equal halves, because only the sum matters to a request that runs alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import UnavailableError
from paceline.core.step_record import StepRecord
from paceline.core.step_times import Delay
from paceline.profiler.fit import delay_of
from paceline.profiler.measure import Traced
from paceline.profiler.stack import ProfiledAnswer


@dataclass(frozen=True, slots=True)
class Overheads:
    """Delays of `Profile`, and the times that requests need to join their workers."""

    gateway: Delay
    admit: Delay
    first_token: Delay
    handoff: Delay
    token: Delay
    prefill_join: Delay
    decode_join: Delay


def find_overheads(
    singles: Sequence[Traced], texts: Sequence[Traced], decode_step: float, lateness: Sequence[float] = ()
) -> Overheads:
    """Return the delays around steps, from requests that ran alone.

    Args:
        singles: requests with token ids that ran alone; at least one.
        texts: requests with texts that ran alone; may be empty.
        decode_step: time of a decode step with one sequence, in seconds.
        lateness: lateness of each token relative to the usual time, in seconds; empty if unknown.

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
    # A second token comes one decode step after the handoff. The rest is the time of messages in both directions.
    handed = [part for part in parts if part["told"] is not None and part["second"] is not None]
    around = [max(0.0, part["second"] - part["told"] - decode_step) / 2 for part in handed]
    told = [
        max(0.0, part["told"] - part["first"]) + half
        for part, half in zip(parts, after_step)
        if part["told"] is not None
    ]
    # The gaps between tokens depend only on differences of their delays, and no delay is negative.
    usual = max(statistics.median(around or [0.0]), -min(lateness, default=0.0))
    return Overheads(
        gateway=delay_of([part["asked"] for part in parts]).model_copy(update={"per_token": per_token}),
        admit=delay_of([part["admitted"] - part["asked"] for part in parts]),
        first_token=delay_of([half + part["client"] for part, half in zip(parts, after_step)]),
        handoff=delay_of(told),
        token=delay_of([usual + late for late in lateness] or around),
        prefill_join=delay_of(after_step),
        decode_join=delay_of(around),
    )


def find_lateness(answers: Sequence[ProfiledAnswer], steps: Sequence[StepRecord]) -> list[float]:
    """Return the lateness, in seconds, of the tokens in the second half of each answer, as the client got them.

    The first tokens after a handoff are late more often, and would be only a small part of a longer answer. The clocks
    of the worker and of the client are not compared. Lateness is relative to the median of each answer. Answers whose
    tokens do not agree with steps are left out, such as answers of which the client got two tokens in one piece.

    Args:
        answers: answers of requests that ran alone, one after another.
        steps: steps of the worker that decoded the answers, in order. Steps of other requests may follow.
    """
    found: list[float] = []
    decoded = iter(_decoded(steps))
    for answer in answers:
        # The first step attends to the prompt and to the first token.
        own_steps = next((each for each in decoded if each[0].context_tokens == answer.prompt_tokens + 1), [])
        ways = [came - step.ended for came, step in zip(answer.token_times[1:], own_steps)]
        if ways and len(ways) == len(own_steps) == len(answer.token_times) - 1:
            later = ways[len(ways) // 2 :]
            usual = statistics.median(later)
            found += [way - usual for way in later]
    return found


def _decoded(steps: Sequence[StepRecord]) -> Iterator[list[StepRecord]]:
    """Yield the steps of each sequence that was decoded alone."""
    group: list[StepRecord] = []
    for step in steps:
        follows = group and (step.number, step.context_tokens) == (group[-1].number + 1, group[-1].context_tokens + 1)
        if not follows and group:
            yield group
            group = []
        if step.sequences == 1:
            group.append(step)
    if group:
        yield group


def find_admit(alone: Sequence[Traced], crowded: Sequence[Traced], decode_step: float) -> Delay:
    """Return the delay of first tokens while decode workers use the same cores, without the effect of longer steps.

    A prompt also waits for its turn, which the simulator counts apart: on average for half of a decode step.

    Args:
        alone: requests that ran alone.
        crowded: requests whose prompts came while other requests were answered.
        decode_step: time of a decode step during the crowded requests, in seconds.
    """
    around, more = (
        [part["first"] + part["client"] - part["steps"] for part in map(_parts, answers) if part]
        for answers in (alone, crowded)
    )
    if not around or not more:
        return Delay()
    usual = statistics.median(around) + decode_step / 2
    return delay_of([max(0.0, each - usual) for each in more])


def find_admission(alone: Sequence[Traced], arrivals: Sequence[Sequence[Traced]]) -> float:
    """Return the seconds by which an admission takes longer for each other admission at the same time.

    Args:
        alone: requests that came alone.
        arrivals: groups of requests that came at the same time. Requests that were admitted last may have waited for
            more than the work of admissions, so only the first half of each group counts.
    """
    usual = [part["admitted"] for part in map(_parts, alone) if part]
    longer = []
    for group in arrivals:
        admitted = sorted(part["admitted"] for part in map(_parts, group) if part)
        if usual and len(admitted) > 1:
            first = statistics.median(admitted[: len(admitted) // 2])
            longer.append(max(0.0, first - statistics.median(usual)) / (len(admitted) - 1))
    return statistics.median(longer) if longer else 0.0


def _parts(traced: Traced) -> dict[str, Any] | None:
    """Return the instants of a request in seconds from its arrival; None if the request had more than one attempt."""
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
        # The difference between the client's and the gateway's times is the way to the gateway and back.
        "client": max(0.0, answer.token_times[0] - first),
        "told": handoff["told_ms"] / 1000 if handoff and handoff["told_ms"] is not None else None,
        "second": decode["first_token_ms"] / 1000 if decode else None,
    }
