"""Fitting step times: piecewise linear curves with a linear term, robust against single slow steps. Pure functions."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.step_record import StepRecord
from paceline.core.step_times import Curve, Delay, Spread, StepTimes

HELD_OUT = 4
"""One of this many steps is held out of the fit, to measure the fit's quality."""
LEAST_STEPS = 3
"""Smallest number of steps with one amount of work from which a point of the curve is fitted."""
MOST_LEVELS = 201
_ROUNDS = 12
"""Rounds in which the weights of a robust fit settle."""
_LEAST_RATIO = 0.01
"""Steps with relative errors below this get no more weight than steps with this error."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of a fit: number of held-out steps, and median and 99th percentile of their relative errors."""

    steps: int
    median: float
    p99: float

    def __str__(self) -> str:
        return f"median error {self.median:.1%}, p99 {self.p99:.1%} over {self.steps} held-out steps"


@dataclass(frozen=True, slots=True)
class Fit:
    """A fit of step times: seconds by the amount of work, and the seconds that each unit of another amount adds."""

    curve: Curve
    slope: float
    spread: Spread
    quality: Quality

    def at(self, work: float, other: float) -> float:
        return self.curve.at(work) + self.slope * other


def fit(work: Sequence[float], other: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit seconds = curve(work) + slope * other, by least absolute relative errors. Curve and slope are never negative.

    The curve has a point at each amount of work that was measured at least LEAST_STEPS times.

    Args:
        work, other, seconds: one value for each step; at least one step.
    """
    x, z, y = (np.asarray(values, float) for values in (work, other, seconds))
    held = np.arange(len(y)) % HELD_OUT == HELD_OUT - 1
    values, counts = np.unique(x[~held], return_counts=True)
    often = counts >= LEAST_STEPS
    knots = values[often] if often.any() else values
    columns = np.column_stack([_hats(x, knots), z])
    found = _robust(columns[~held], y[~held])
    fitted = columns @ found
    ratios = y / np.maximum(fitted, 1e-9)
    errors = np.abs(ratios[held] - 1) if held.any() else np.abs(ratios - 1)
    curve = Curve(points=tuple(zip(knots.tolist(), found[:-1].tolist(), strict=True)))
    quality = Quality(len(errors), float(np.median(errors)), float(np.quantile(errors, 0.99)))
    return Fit(curve, float(found[-1]), spread_of(ratios.tolist()), quality)


def spread_of(ratios: Sequence[float]) -> Spread:
    """Return the distribution of ratios, with at most as many levels as there are ratios."""
    levels = max(2, min(MOST_LEVELS, len(ratios)))
    return Spread(quantiles=tuple(np.quantile(ratios, np.linspace(0, 1, levels)).round(5).tolist()))


def delay_of(seconds: Sequence[float]) -> Delay:
    """Return the delay that has exactly these times as its distribution; a delay of 0 if there are no times."""
    scale = (statistics.median(seconds) or statistics.fmean(seconds)) if seconds else 0.0
    return Delay(seconds=scale, spread=spread_of([each / scale for each in seconds])) if scale > 0 else Delay()


def _hats(x: Floats, knots: Floats) -> Floats:
    """Return the weight of each point of a curve at each x: [len(x), len(knots)]. Beyond the curve's ends, the weights
    extrapolate in the way of `Curve`.
    """
    if len(knots) == 1:
        return np.ones((len(x), 1))
    index = np.clip(np.searchsorted(knots, x, side="left"), 1, len(knots) - 1)
    share = (np.maximum(x, knots[0]) - knots[index - 1]) / (knots[index] - knots[index - 1])
    made = np.zeros((len(x), len(knots)))
    rows = np.arange(len(x))
    made[rows, index - 1], made[rows, index] = 1 - share, share
    return made


def _robust(columns: Floats, y: Floats) -> Floats:
    """Return the non-negative coefficients with the least sum of absolute relative errors."""
    scaled = columns / y[:, None]
    weights = np.ones(len(y))
    found: Floats = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        found = _nonnegative(scaled * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(scaled @ found - 1), _LEAST_RATIO))
    return found


def _nonnegative(columns: Floats, y: Floats) -> Floats:
    """Return the non-negative least-squares solution, by the active set of Lawson and Hanson."""
    count = columns.shape[1]
    scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    columns = columns / scale
    free = np.zeros(count, bool)
    found: Floats = np.zeros(count)
    for _ in range(3 * count):
        gradient = columns.T @ (y - columns @ found)
        gradient[free] = -np.inf
        if gradient.max() <= 1e-10:
            break
        free[gradient.argmax()] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(columns[:, free], y, rcond=None)[0]
            if not (free & (trial <= 0)).any():
                break
            falling = free & (trial <= 0)
            step = (found[falling] / np.maximum(found[falling] - trial[falling], 1e-300)).min()
            found = found + step * (trial - found)
            free &= found > 1e-12
        found = trial
    return np.asarray(found / scale)


def fit_steps(
    prompts: Sequence[StepRecord], decoding: Sequence[StepRecord], mixed: Sequence[StepRecord]
) -> tuple[StepTimes, dict[str, Quality]]:
    """Fit the times of one role's steps.

    Args:
        prompts: steps that computed only prompts; at least one.
        decoding: steps that computed only tokens after prompts; at least one.
        mixed: steps that computed prompts and tokens after prompts; may be empty.

    Returns:
        The times, and the quality of each fit.
    """
    tokens = fit(
        [row.prompt_tokens for row in prompts],
        [row.prompt_pairs - row.prompt_tokens / 2 for row in prompts],
        [row.seconds for row in prompts],
    )
    rows = fit(
        [row.sequences + row.drafts for row in decoding],
        [row.context_tokens for row in decoding],
        [row.seconds for row in decoding],
    )
    saved = [
        tokens.at(row.prompt_tokens, row.prompt_pairs - row.prompt_tokens / 2)
        + rows.at(row.sequences + row.drafts, row.context_tokens)
        - row.seconds
        for row in mixed
    ]
    times = StepTimes(
        prefill=tokens.curve,
        prefill_pair=tokens.slope,
        decode=rows.curve,
        decode_context=rows.slope,
        # A mixed step reads the weights once for both parts, and reading them is nearly all that a step of one row
        # does.
        shared=max(0.0, float(np.median(saved))) if saved else rows.curve.points[0][1] * _READS_SHARE,
        prefill_spread=tokens.spread,
        decode_spread=rows.spread,
    )
    return times, {"prompts": tokens.quality, "decoding": rows.quality}


_READS_SHARE = 0.8
"""Share of a step with one row that is reading weights, if no mixed step was measured."""


def with_gaps(rows: Sequence[StepRecord]) -> list[StepRecord]:
    """Return steps with the time that the worker needs between two steps added to each.

    The added time is the median time from the end of a step until the next one begins, over steps that continue the
    same requests.
    """
    gaps = [
        after.ended - before.ended - after.seconds
        for before, after in itertools.pairwise(rows)
        if _goes_on(before, after)
    ]
    gap = max(0.0, float(np.median(gaps))) if gaps else 0.0
    return [row._replace(seconds=row.seconds + gap) for row in rows]


def _goes_on(before: StepRecord, after: StepRecord) -> bool:
    """Return whether a step has only requests of the step before it. Otherwise, the worker may have waited for work."""
    if after.number != before.number + 1 or after.sequences > before.sequences:
        return False
    if after.prompt_tokens:  # a prompt has not begun with this step if its tokens attend to earlier ones
        return after.prompt_pairs > after.prompt_tokens * (after.prompt_tokens + 1) // 2
    return after.sequences == before.sequences and after.context_tokens > before.context_tokens
