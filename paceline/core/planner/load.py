"""The load of a fleet: what arrives now, as measured lately, and what will arrive, as forecast.

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
LENGTHS_HALF_LIFE = 60.0
"""Seconds after which a length or a latency counts half."""
_LEVEL, _TREND, _DAMPED = 0.5, 0.3, 0.8
"""Weights of the newest value in level and trend, and the part of a trend that is left after each interval."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests of one class as they arrive, or as they are expected."""

    rate: float
    """Requests per second."""
    prompt_tokens: Distribution
    """Lengths of prompts. Only their shape counts, so that old counts may have faded."""
    cached_share: float
    answer_tokens: Distribution
    media_rate: float = 0.0
    stretch_prompts: float = 1.0
    """Factor by which prompts are expected to be longer than `prompt_tokens`."""
    stretch_answers: float = 1.0

    @property
    def uncached(self) -> float:
        """Factor from the length of a prompt to the tokens that a prefill worker computes."""
        return self.stretch_prompts * (1 - self.cached_share)

    def work(self, role: Role) -> float:
        """Return the work per second that arrives for a role, in tokens (media inputs for encode)."""
        if role == "prefill":
            return self.rate * self.prompt_tokens.mean * self.uncached
        if role == "decode":
            return self.rate * self.answer_tokens.mean * self.stretch_answers
        return self.media_rate


@dataclass(frozen=True, slots=True)
class Series:
    """Level and trend of a number that is measured once an interval."""

    level: float = 0.0
    trend: float = 0.0
    values: int = 0

    def add(self, value: float) -> Series:
        """Return this with the value of one more interval."""
        if not self.values:
            return Series(value, 0.0, 1)
        level = _LEVEL * value + (1 - _LEVEL) * (self.level + _DAMPED * self.trend)
        trend = _TREND * (level - self.level) + (1 - _TREND) * _DAMPED * self.trend
        return Series(level, trend, self.values + 1)

    def forecast(self, intervals: float, noise: float) -> float:
        """Return the value expected after this many intervals. A trend no larger than `noise` is none."""
        trend = math.copysign(max(0.0, abs(self.trend) - noise), self.trend)
        reach: float = _DAMPED * (1 - _DAMPED**intervals) / (1 - _DAMPED)
        return max(0.0, self.level + reach * trend)


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """What is remembered of one class of requests."""

    arrivals: float = 0.0
    seconds: float = 0.0
    """Recent arrivals, and the time in which they came; both fade, so that their quotient is a rate at once."""
    media_items: float = 0.0
    cached_tokens: float = 0.0
    started_tokens: float = 0.0
    prompt_tokens: Distribution = field(default_factory=Distribution)
    answer_tokens: Distribution = field(default_factory=Distribution)
    ttft: Distribution = field(default_factory=Distribution)
    itl: Distribution = field(default_factory=Distribution)
    interval: tuple[float, ...] = (0.0,) * 5
    """Since the last forecast: seconds, arrivals, tokens of prompts, finished answers, tokens of answers."""
    rates: Series = Series()
    prompts: Series = Series()
    answers: Series = Series()

    def add(self, traffic: Traffic) -> ClassLoad:
        """Return this with the traffic of one more interval."""
        quick = 0.5 ** (traffic.seconds / ARRIVALS_HALF_LIFE)
        slow = 0.5 ** (traffic.seconds / LENGTHS_HALF_LIFE)
        prompts, answers = traffic.prompt_tokens, traffic.answer_tokens
        new = (traffic.seconds, traffic.arrivals, prompts.total, answers.count, answers.total)
        return replace(
            self,
            arrivals=self.arrivals * quick + traffic.arrivals,
            seconds=self.seconds * quick + traffic.seconds,
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

    def end_interval(self) -> ClassLoad:
        """Return this after an interval between two forecasts has ended."""
        seconds, arrivals, prompt_tokens, finished, answer_tokens = self.interval
        if seconds <= 0:
            return self
        return replace(
            self,
            interval=(0.0,) * 5,
            rates=self.rates.add(arrivals / seconds),
            prompts=self.prompts.add(prompt_tokens / arrivals) if arrivals else self.prompts,
            answers=self.answers.add(answer_tokens / finished) if finished else self.answers,
        )

    def now(self) -> Demand:
        """Return the load as measured lately."""
        seconds = self.seconds or 1.0
        cached = min(1.0, self.cached_tokens / self.started_tokens) if self.started_tokens else 0.0
        return Demand(
            self.arrivals / seconds, self.prompt_tokens, cached, self.answer_tokens, self.media_items / seconds
        )

    def expected(self, horizon: float, interval: float) -> Demand | None:
        """Return the load expected after `horizon` seconds, if forecasts are made each `interval`; None if unknown."""
        if not self.rates.values:
            return None
        now, ahead = self.now(), horizon / interval
        rate = self.rates.forecast(ahead, math.sqrt(self.rates.level / interval))
        prompt = self.prompts.forecast(ahead, 0.1 * self.prompts.level)
        answer = self.answers.forecast(ahead, 0.1 * self.answers.level)
        return replace(
            now,
            rate=rate,
            media_rate=now.media_rate * (rate / now.rate if now.rate else 1.0),
            stretch_prompts=prompt / now.prompt_tokens.mean if prompt and now.prompt_tokens.mean else 1.0,
            stretch_answers=answer / now.answer_tokens.mean if answer and now.answer_tokens.mean else 1.0,
        )

    def noise(self, role: Role) -> float:
        """Return the standard deviation of `now().work(role)` that chance alone causes, for independent arrivals."""
        lengths = self.prompt_tokens if role == "prefill" else self.answer_tokens
        mean, count = self.now().work(role), max(self.arrivals, 1.0)
        return mean * math.sqrt((1 + lengths.squared_variation) / count)


@dataclass(frozen=True, slots=True)
class Sample:
    """The work that arrived for every role at one instant, and how much of it chance explains."""

    at: float
    work: Mapping[Role, float]
    noise: Mapping[Role, float]

    @staticmethod
    def of(at: float, classes: Iterable[ClassLoad], roles: Iterable[Role]) -> Sample:
        """Return the sample of this instant."""
        classes, roles = list(classes), list(roles)
        work = {role: math.fsum(each.now().work(role) for each in classes) for role in roles}
        noise = {role: math.hypot(*(each.noise(role) for each in classes)) for role in roles}
        return Sample(at, work, noise)

    def differs(self, other: Sample, role: Role) -> bool:
        """Return whether the load of a role has changed between two samples, beyond what chance explains."""
        first, second = self.work.get(role, 0.0), other.work.get(role, 0.0)
        chance = math.hypot(self.noise.get(role, 0.0), other.noise.get(role, 0.0))
        return abs(first - second) > max(0.25 * max(first, second), 4 * chance)


def _sum(first: Distribution, second: Distribution, fade: float = 1.0) -> Distribution:
    """Return the values of both. The first ones fade if there are new ones."""
    if not second.counts:
        return first
    whole = first.faded(fade)
    whole.merge(second)
    return whole
