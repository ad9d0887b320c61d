"""Fits of turns: the effects that a prefill and a decode worker on the same cores have on each other."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.core.step_record import StepRecord
from paceline.core.step_times import Curve, StepTimes, TurnTimes
from paceline.core.turns import STEPS
from paceline.profiler.fit import Fit, delay_of, fit

_LEAST_SHARE = 0.2
"""Least share of a prompt's step that decode, and also prefill, must have had. Other steps tell nothing about turns."""
_LEAST_PROMPTS = 3
"""The speed of prefill beside a number of rows is fitted from at least this many prompts."""
_WHOLE = 0.9
"""If prefill computed for at least this share of the time between two decode steps, the time was prefill's turn."""
_LEAST_STEPS = 8
"""Least number of steps from which times are fitted."""


def find_turns(
    itl_target: float,
    prompts: Sequence[StepRecord],
    decoding: Sequence[StepRecord],
    prefill: StepTimes,
    decode: StepTimes,
) -> TurnTimes:
    """Return the times of turns, fitted to simultaneous steps of a prefill and a decode worker on the same cores.

    Args:
        itl_target: target for the time between tokens that the workers were given, in seconds; 0 if none was given.
        prompts: steps that computed prompts.
        decoding: decode steps in the same period, timed on the same clock.
        prefill: times of steps with prompts while no worker decodes.
        decode: times of decode steps while no prompt is computed.
    """
    turns = TurnTimes(itl_target=itl_target, least_share=0.5, backlog_share=0.5) if itl_target else TurnTimes()
    found: dict[str, object] = {}
    if speeds := list(_speeds(prompts, decoding, prefill)):
        found["prefill_speed"] = Curve(points=tuple(speeds))
    if late := list(_lateness(turns, prompts, decoding)):
        found["late"] = delay_of(late)
    if fitted := _crowded_steps(prompts, decoding, decode):
        found |= {"decode": fitted.curve, "decode_per_token": fitted.slope, "decode_spread": fitted.spread}
    return turns.model_copy(update=found)


class MeasuredArrivals(NamedTuple):
    """A group of requests that came at the same time, and the steps that computed their prompts."""

    requests: int
    prompts: Sequence[StepRecord]
    """The steps that computed the requests' prompts, on one worker."""
    decoding: Sequence[StepRecord] = ()
    """Decode steps on the same cores during that time."""


def find_arrival(arrivals: Sequence[MeasuredArrivals], prefill: StepTimes, turns: TurnTimes) -> float:
    """Return the seconds by which a prompt takes longer with each further request that arrives.

    Args:
        prefill: times of steps with prompts while no worker decodes.
        turns: the speed of prefill while a worker decodes.
    """
    longer = []
    for count, prompts, decoding in arrivals:
        if prompts and count > 1:
            usual = sum(_alone(row, prefill) / turns.speed_of_prefill(_rows_beside(row, decoding)) for row in prompts)
            whole = prompts[-1]._replace(seconds=prompts[-1].ended - prompts[0].ended + prompts[0].seconds)
            seconds = whole.seconds - sum(_common(whole, other) for other in decoding)
            longer.append(max(0.0, seconds - usual) / (count - 1))
    return statistics.median(longer) if longer else 0.0


def _speeds(
    prompts: Sequence[StepRecord], decoding: Sequence[StepRecord], prefill: StepTimes
) -> Iterator[tuple[float, float]]:
    """Yield numbers of decoding rows, ascending, each with the speed of prefill in its own turns beside them."""
    speeds = defaultdict[int, list[float]](list)
    for row in prompts:
        seconds = row.seconds - sum(_common(row, other) for other in decoding)
        if _LEAST_SHARE * row.seconds <= seconds <= (1 - _LEAST_SHARE) * row.seconds:
            speeds[_rows_beside(row, decoding)].append(_alone(row, prefill) / seconds)
    for rows, found in sorted(speeds.items()):
        if len(found) >= _LEAST_PROMPTS:
            yield rows, statistics.median(found)


def _crowded_steps(prompts: Sequence[StepRecord], decoding: Sequence[StepRecord], decode: StepTimes) -> Fit | None:
    """Return the times of decode steps while prefill has work, by rows and by tokens of prefill's step."""
    rows, tokens, seconds = [], [], []
    for row in decoding:
        common, beside = max(((_common(row, other), other.prompt_tokens) for other in prompts), default=(0.0, 0))
        if common > 0.5 * row.seconds:
            rows.append(row.sequences + row.drafts)
            tokens.append(beside)
            seconds.append(max(1e-6, row.seconds - decode.decode_context * row.context_tokens))
    return fit(rows, tokens, seconds) if len(rows) >= _LEAST_STEPS else None


def _lateness(turns: TurnTimes, prompts: Sequence[StepRecord], decoding: Sequence[StepRecord]) -> Iterator[float]:
    """Yield, for each turn of prefill, the seconds by which it was longer than the rule of `core/turns.py`."""
    recent: deque[float] = deque(maxlen=STEPS)
    for before, after in itertools.pairwise(decoding):
        recent.append(before.seconds)
        gap = after.ended - after.seconds - before.ended
        turn = after._replace(ended=before.ended + gap, seconds=gap)
        if after.number == before.number + 1 and sum(_common(turn, other) for other in prompts) > _WHOLE * gap > 0:
            yield max(0.0, gap - turns.left_to_prefill(recent))


def _alone(row: StepRecord, prefill: StepTimes) -> float:
    """Return the time of a prompt's step without decoding."""
    return prefill.prefill_seconds(row.prompt_tokens, row.prompt_pairs - row.prompt_tokens / 2)


def _rows_beside(row: StepRecord, decoding: Sequence[StepRecord]) -> int:
    """Return the number of rows that decoded during a prompt's step; 0 if none did."""
    beside = [other.sequences for other in decoding if _common(row, other)]
    return int(statistics.median(beside)) if beside else 0


def _common(one: StepRecord, other: StepRecord) -> float:
    """Return the seconds that two steps have in common."""
    return max(0.0, min(one.ended, other.ended) - max(one.ended - one.seconds, other.ended - other.seconds))
