"""The load of a fleet: the arrivals that were measured lately, and a forecast of later arrivals.

Recent load is a sum of reports in which old ones count less and less. Forecasts continue the level and the damped trend
of a minute's arrivals and lengths (Holt's method).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from paceline.core.planner.distribution import Distribution
from paceline.core.planner.reports import Role, Traffic

ARRIVALS_HALF_LIFE = 20.0
"""Seconds after which an arrival counts half in the recent rate."""
NEWEST_HALF_LIFE = 5.0
"""Seconds after which an arrival counts half in the newest rate. This rate follows changes of the load at once, but is
less exact than the recent rate.
"""
LENGTHS_HALF_LIFE = 30.0
"""Seconds after which a length or a latency counts half."""
_LEVEL, _TREND, _DAMPED = 0.6, 0.4, 0.9
"""Weight of the newest value in the level, its weight in the trend, and the factor on a trend for each further
interval.
"""
_ERRORS = 40
"""Number of errors of forecasts that are remembered."""


@dataclass(frozen=True, slots=True)
class ClassDemand:
    """The measured or forecast demand of one class of requests."""

    rate: float
    """Requests per second."""
    prompt_tokens: Distribution
    """Lengths of prompts, in tokens. Only ratios between counts matter, so old counts may have faded."""
    cached_share: float
    answer_tokens: Distribution
    media_rate: float = 0.0
    stretch_prompts: float = 1.0
    """Factor by which prompts are expected to be longer than `prompt_tokens`."""
    stretch_answers: float = 1.0

    @property
    def uncached(self) -> float:
        """Factor from a length in `prompt_tokens` to the tokens that a prefill worker is expected to compute."""
        return self.stretch_prompts * (1 - self.cached_share)

    def work(self, role: Role) -> float:
        """Return the work per second that arrives for a role, in tokens (media inputs for encode)."""
        if role in ("prefill", "pool"):
            return self.rate * self.prompt_tokens.mean * self.uncached
        if role == "decode":
            return self.rate * self.answer_tokens.mean * self.stretch_answers
        return self.media_rate


@dataclass(frozen=True, slots=True)
class Series:
    """Level and trend of a number that is measured once in each interval."""

    level: float = 0.0
    trend: float = 0.0
    values: int = 0
    made: tuple[float, ...] = ()
    """Forecasts that were made for intervals still to come, oldest first."""
    errors: tuple[float, ...] = ()
    """Newest differences (measured value - its forecast), oldest first."""

    def add(self, value: float, ahead: int) -> Series:
        """Return the series with the value of one more interval, and with a forecast for `ahead` intervals later."""
        after = self._follow(value)
        made, errors = after.made, after.errors
        if len(made) >= ahead:
            made, errors = made[-ahead + 1 :] if ahead > 1 else (), (*errors, value - made[-ahead])[-_ERRORS:]
        return replace(after, made=(*made, after.forecast(ahead)), errors=errors)

    def _follow(self, value: float) -> Series:
        if not self.values:
            return replace(self, level=value, values=1)
        level = max(0.0, _LEVEL * value + (1 - _LEVEL) * (self.level + _DAMPED * self.trend))
        trend = _TREND * (level - self.level) + (1 - _TREND) * _DAMPED * self.trend
        return replace(self, level=level, trend=trend, values=self.values + 1)

    def forecast(self, intervals: float) -> float:
        """Return the forecast value after this many intervals.

        A falling trend is not continued, so the fleet shrinks only after the load has fallen.
        """
        reach: float = _DAMPED * (1 - _DAMPED**intervals) / (1 - _DAMPED)
        return self.level + reach * max(0.0, self.trend)

    def caution(self) -> float:
        """Return the 90th percentile of the amounts by which values exceeded their forecasts lately, at least 0."""
        return max(0.0, sorted(self.errors)[math.ceil(0.9 * len(self.errors)) - 1]) if self.errors else 0.0


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """The remembered load of one class of requests."""

    arrivals: float = 0.0
    seconds: float = 0.0
    """Length of the time in which `arrivals` came, in seconds. Both numbers fade, so that `arrivals / seconds` is the
    recent rate, also soon after the start.
    """
    newest_arrivals: float = 0.0
    newest_seconds: float = 0.0
    media_items: float = 0.0
    cached_tokens: float = 0.0
    started_tokens: float = 0.0
    prompt_tokens: Distribution = field(default_factory=Distribution)
    answer_tokens: Distribution = field(default_factory=Distribution)
    ttft: Distribution = field(default_factory=Distribution)
    itl: Distribution = field(default_factory=Distribution)
    interval: tuple[float, ...] = (0.0,) * 5
    """Sums since the last forecast: seconds, arrivals, tokens of prompts, finished answers, tokens of answers."""
    rates: Series = Series()
    prompts: Series = Series()
    answers: Series = Series()

    def add(self, traffic: Traffic) -> ClassLoad:
        """Return the load with the traffic of one more interval added."""
        quick = 0.5 ** (traffic.seconds / ARRIVALS_HALF_LIFE)
        newest = 0.5 ** (traffic.seconds / NEWEST_HALF_LIFE)
        slow = 0.5 ** (traffic.seconds / LENGTHS_HALF_LIFE)
        prompts, answers = traffic.prompt_tokens, traffic.answer_tokens
        new = (traffic.seconds, traffic.arrivals, prompts.total, answers.count, answers.total)
        return replace(
            self,
            arrivals=self.arrivals * quick + traffic.arrivals,
            seconds=self.seconds * quick + traffic.seconds,
            newest_arrivals=self.newest_arrivals * newest + traffic.arrivals,
            newest_seconds=self.newest_seconds * newest + traffic.seconds,
            media_items=self.media_items * quick + traffic.media_items,
            cached_tokens=self.cached_tokens * slow + traffic.cached_tokens,
            started_tokens=self.started_tokens * slow + traffic.started_tokens,
            # Lengths are kept while nothing arrives: the next requests are expected to be like the last ones.
            prompt_tokens=_sum(self.prompt_tokens, prompts, slow),
            answer_tokens=_sum(self.answer_tokens, answers, slow),
            ttft=_sum(self.ttft.faded(slow), traffic.ttft),
            itl=_sum(self.itl.faded(slow), traffic.itl),
            interval=tuple(before + more for before, more in zip(self.interval, new)),
        )

    def end_interval(self, ahead: int) -> ClassLoad:
        """Return the load with the interval closed: its arrivals enter the history, and the next interval starts empty.
        Forecasts are for `ahead` intervals later."""
        seconds, arrivals, prompt_tokens, finished, answer_tokens = self.interval
        if seconds <= 0:
            return self
        return replace(
            self,
            interval=(0.0,) * 5,
            rates=self.rates.add(arrivals / seconds, ahead),
            prompts=self.prompts.add(prompt_tokens / arrivals, ahead) if arrivals else self.prompts,
            answers=self.answers.add(answer_tokens / finished, ahead) if finished else self.answers,
        )

    def now(self) -> ClassDemand:
        """Return the load as measured lately."""
        seconds = self.seconds or 1.0
        cached = min(1.0, self.cached_tokens / self.started_tokens) if self.started_tokens else 0.0
        return ClassDemand(
            self.arrivals / seconds, self.prompt_tokens, cached, self.answer_tokens, self.media_items / seconds
        )

    def expected(self, ahead: int) -> ClassDemand | None:
        """Return the demand that is expected after `ahead` more intervals; None if no interval has ended yet.

        The rate is the forecast plus `Series.caution`: the amount by which forecasts have been too low lately.
        """
        if not self.rates.values:
            return None
        now = self.now()
        rate = self.rates.forecast(ahead) + self.rates.caution()
        prompt, answer = self.prompts.forecast(ahead), self.answers.forecast(ahead)
        return replace(
            now,
            rate=rate,
            media_rate=now.media_rate * (rate / now.rate if now.rate else 1.0),
            stretch_prompts=prompt / now.prompt_tokens.mean if prompt and now.prompt_tokens.mean else 1.0,
            stretch_answers=answer / now.answer_tokens.mean if answer and now.answer_tokens.mean else 1.0,
        )

    def newest(self, role: Role) -> tuple[float, float]:
        """Return the most recent rate of work for a role, and its standard deviation if arrivals are independent."""
        now = self.now()
        rate = self.newest_arrivals / (self.newest_seconds or 1.0)
        work = now.work(role) * (rate / now.rate) if now.rate else 0.0
        lengths = self.prompt_tokens if role in ("prefill", "pool") else self.answer_tokens
        return work, work * math.sqrt((1 + lengths.squared_variation) / max(self.newest_arrivals, 1.0))


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The rate of work for every role at one instant, with the standard deviation that random arrivals explain."""

    at: float
    work: Mapping[Role, float]
    noise: Mapping[Role, float]

    @staticmethod
    def of(at: float, classes: Iterable[ClassLoad], roles: Iterable[Role]) -> LoadSample:
        """Return the sample of this instant."""
        classes, roles = list(classes), list(roles)
        newest = {role: [each.newest(role) for each in classes] for role in roles}
        work = {role: math.fsum(work for work, _ in values) for role, values in newest.items()}
        noise = {role: math.hypot(*(noise for _, noise in values)) for role, values in newest.items()}
        return LoadSample(at, work, noise)

    def differs(self, other: LoadSample, role: Role) -> bool:
        """Return whether the load of a role has changed between two samples by more than chance explains."""
        first, second = self.work.get(role, 0.0), other.work.get(role, 0.0)
        chance = math.hypot(self.noise.get(role, 0.0), other.noise.get(role, 0.0))
        return abs(first - second) > max(0.25 * max(first, second), 4 * chance)


def _sum(first: Distribution, second: Distribution, fade: float = 1.0) -> Distribution:
    """Return the values of both distributions. The values of `first` fade if `second` has values."""
    if not second.counts:
        return first
    whole = first.faded(fade)
    whole.merge(second)
    return whole
