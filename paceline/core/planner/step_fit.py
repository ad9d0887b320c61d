"""Step times, learned from the steps that the workers of a role have computed, without profiling a worker.

Slow first steps of cold workers must not spoil a fit. Three rules prevent this. Steps of workers that have just started
are not observed (`memory.py`). Each worker contributes a median, not a mean. For each load, the median of the newest
contributions counts.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.planner.reports import Steps

_KEPT = 31
"""Number of observations that are kept of each load. A minority of outliers hardly moves their median."""
_ENOUGH = 5
"""Least number of observations, over all loads, from which step times are computed."""
_BEYOND = 1.5
"""Step times are believed up to this multiple of the largest load that was observed."""


@dataclass(frozen=True, slots=True)
class FittedStepTimes:
    """Seconds of a step as a linear function of its load: fixed + per_token * tokens + per_context * context."""

    fixed: float
    per_token: float
    per_context: float
    observed_tokens: float
    """The number of tokens of the largest step that was observed."""

    @property
    def most_tokens(self) -> float:
        """The largest number of tokens in a step for which these times are believed."""
        return _BEYOND * self.observed_tokens

    def seconds(self, tokens: float, context: float) -> float:
        """Return the seconds of a step that computes `tokens` tokens and reads the KV of `context` tokens."""
        return self.fixed + self.per_token * tokens + self.per_context * context


@dataclass(frozen=True, slots=True)
class Observed:
    """The newest observations of steps with about the same load."""

    tokens: float
    context: float
    seconds: tuple[float, ...]
    """Median step times of workers, in seconds, oldest first."""

    def add(self, steps: Steps) -> Observed:
        """Return the observations with one more added. The newest observations count most."""
        share = 1 / (1 + min(len(self.seconds), _KEPT // 2))
        return Observed(
            self.tokens + share * (steps.tokens - self.tokens),
            self.context + share * (steps.context - self.context),
            (*self.seconds, steps.seconds.percentile(0.5))[-_KEPT:],
        )


@dataclass(frozen=True, slots=True)
class StepFit:
    """All observations of one role, by load."""

    loads: Mapping[str, Observed] = field(default_factory=dict)

    def observe(self, batch: Iterable[Steps]) -> StepFit:
        """Return a fit that also includes the steps of one worker's report."""
        loads = dict(self.loads)
        for steps in batch:
            if steps.seconds.count and steps.tokens > 0:
                name = _load(steps)
                loads[name] = loads.get(name, Observed(steps.tokens, steps.context, ())).add(steps)
        return StepFit(loads)

    def times(self) -> FittedStepTimes | None:
        """Return the step times that fit best; None if too little was observed."""
        known = list(self.loads.values())
        if sum(len(each.seconds) for each in known) < _ENOUGH:
            return None
        fixed, per_token, per_context = _fit(known)
        return FittedStepTimes(fixed, per_token, per_context, max(each.tokens for each in known))


def _load(steps: Steps) -> str:
    """Return the name of a load: tokens rounded to half doublings, context rounded to doublings."""
    return f"{round(2 * math.log2(max(steps.tokens, 1)))}/{round(math.log2(max(steps.context, 1)))}"


def _middle(each: Observed) -> float:
    return max(statistics.median(each.seconds), 1e-6)


def _fit(known: Sequence[Observed]) -> tuple[float, float, float]:
    """Return the coefficients, none of them negative, with the least sum of squared relative errors.

    Errors are relative to the measured time, so that a load for which only slow steps were seen counts little. There
    are seven ways to choose the coefficients that are not 0, and each is solved exactly.
    """
    rows, right = [], []
    for each in known:
        weight = math.sqrt(len(each.seconds))
        rows.append([weight * value / _middle(each) for value in (1.0, each.tokens, each.context)])
        right.append(weight)
    best, least = (0.0, 0.0, 0.0), math.inf
    for size in (1, 2, 3):
        for chosen in itertools.combinations(range(3), size):
            found = _solve([[row[i] for i in chosen] for row in rows], right)
            if found is None or min(found) < 0:
                continue
            errors = (want - math.fsum(c * row[i] for i, c in zip(chosen, found)) for row, want in zip(rows, right))
            error = math.fsum(error**2 for error in errors)
            # A further coefficient must reduce the error clearly. Otherwise noise decides how a load is extrapolated.
            if error < 0.9 * least - 1e-9:
                whole = dict(zip(chosen, found))
                best, least = (whole.get(0, 0.0), whole.get(1, 0.0), whole.get(2, 0.0)), error
    return best


def _solve(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """Return the least squares solution of `rows @ x = wanted` by normal equations; None if it is not unique."""
    size = len(rows[0])
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    right = [sum(row[i] * want for row, want in zip(rows, wanted)) for i in range(size)]
    scale = [math.sqrt(matrix[i][i]) or 1.0 for i in range(size)]
    matrix = [[matrix[i][j] / (scale[i] * scale[j]) for j in range(size)] for i in range(size)]
    right = [right[i] / scale[i] for i in range(size)]
    for i in range(size):
        if matrix[i][i] < 1e-6:
            return None
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            matrix[j] = [below - factor * above for below, above in zip(matrix[j], matrix[i])]
            right[j] -= factor * right[i]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (right[i] - math.fsum(matrix[i][j] * found[j] for j in range(i + 1, size))) / matrix[i][i]
    return [value / scale[i] for i, value in enumerate(found)]
