"""The number of workers that a load needs, by learned step times. Every function is pure, and its result never falls
when the load grows.

Prefill, pool and encode workers are queues. Their number is the smallest one that keeps the wanted percentile of the
time to first token (Erlang C, with the correction of Allen and Cunneen for times that are not exponential). Decode
workers run their requests at the same time. Their number is the smallest one with which steps are short enough and
requests fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from paceline.core.planner.load import ClassDemand
from paceline.core.planner.objectives import Latency
from paceline.core.planner.step_fit import FittedStepTimes

_TTFT_SHARE, _ITL_SHARE = 0.8, 0.9
"""The share of an objective (TTFT, ITL) that a role may use. The rest is left for handoffs, the network, and errors of
the fit.
"""
_FULL = 0.9
"""The planned share of a worker's places and KV memory in use."""
_MOST = 100_000
"""Largest number of workers that a search tries. No fleet has as many workers of one role."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The demand of one class, and its objectives."""

    demand: ClassDemand
    latency: Latency


@dataclass(frozen=True, slots=True)
class Places:
    """Capacity of one decode worker: sequences that it can run, and its KV memory."""

    max_seqs: float
    kv_tokens: float
    """Number of tokens for which the worker has KV memory; 0 if unknown, or if workers share the memory."""


def prefill_workers(classes: Sequence[Wanted], times: FittedStepTimes, scale: float = 1.0) -> float:
    """Return the number of prefill workers needed for `scale` times this load, or of pool workers, for which the inputs
    of a call are its prompt. The number may be a fraction.
    """
    rates, services, limits = [], [], []
    for each in classes:
        demand = each.demand
        service = _Service.of_prompts(demand, times, each.latency.percentile)
        if demand.rate <= 0 or service.mean <= 0:
            continue
        rates.append(demand.rate * scale)
        services.append(service)
        if each.latency.ttft is not None:
            limits.append((each.latency.percentile, each.latency.ttft * _TTFT_SHARE, service))
    return _queue_workers(rates, services, limits)


def encode_workers(classes: Sequence[Wanted], times: FittedStepTimes, scale: float = 1.0) -> float:
    """Return the number of encode workers needed for `scale` times this load. Encoding may take half of a TTFT."""
    rates, services, limits = [], [], []
    seconds = times.seconds(times.observed_tokens, 0.0)
    service = _Service(seconds, seconds, 1.0)
    for each in classes:
        if each.demand.media_rate <= 0:
            continue
        rates.append(each.demand.media_rate * scale)
        services.append(service)
        if each.latency.ttft is not None:
            limits.append((each.latency.percentile, each.latency.ttft / 2, service))
    return _queue_workers(rates, services, limits)


def decode_workers(
    classes: Sequence[Wanted],
    times: FittedStepTimes,
    prompts: FittedStepTimes | None,
    places: Places,
    scale: float = 1.0,
) -> float:
    """Return the number of decode workers needed for `scale` times this load.

    Args:
        prompts: step times of prefill workers; None if unknown. A request has its place on a decode worker meanwhile.
    """
    active = [each for each in classes if each.demand.work("decode") > 0]
    tokens = scale * math.fsum(each.demand.work("decode") for each in active)
    if not tokens:
        return 0
    context = math.fsum(each.demand.work("decode") * mean_context(each.demand) for each in active) * scale / tokens
    most = sequences_per_worker([each.latency for each in active], times, places, context)
    reserved = 0.0 if prompts is None else scale * math.fsum(_computing(each, prompts) for each in active)
    share = max(each.latency.percentile for each in active)
    spread = NormalDist().inv_cdf(share)

    def enough(workers: int) -> bool:
        running, variance = running_sequences(tokens / workers, times, context, workers)
        # Prompts that are computed at the same time are about Poisson distributed.
        taken, taken_variance = running + reserved / workers, variance + reserved / workers**2
        in_places = taken + spread * math.sqrt(taken_variance) <= places.max_seqs * _FULL
        return in_places and running + spread * math.sqrt(variance) <= most

    return _least(enough)


def _computing(wanted: Wanted, times: FittedStepTimes) -> float:
    """Return the average number of prompts of a class that are computed at the same time."""
    return wanted.demand.rate * _Service.of_prompts(wanted.demand, times, wanted.latency.percentile).mean


def sequences_per_worker(latencies: Sequence[Latency], times: FittedStepTimes, places: Places, context: float) -> float:
    """Return the number of sequences (at least 1) that a decode worker can run within all objectives.

    Args:
        context: tokens of a sequence's KV.
    """
    most = places.max_seqs * _FULL
    if places.kv_tokens and context:
        most = min(most, places.kv_tokens * _FULL / context)
    most = min(most, times.most_tokens)
    per_sequence = times.per_token + times.per_context * context
    for latency in latencies:
        if latency.itl is not None and per_sequence > 0:
            most = min(most, (latency.itl * _ITL_SHARE - times.fixed) / per_sequence)
    return max(1.0, most)


def mean_context(demand: ClassDemand) -> float:
    """Return the average number of tokens of KV of a running sequence: its prompt and half of its answer."""
    answer = demand.answer_tokens.mean * demand.stretch_answers
    return demand.prompt_tokens.mean * demand.stretch_prompts + answer / 2


@dataclass(frozen=True, slots=True)
class _Service:
    """Time that one request keeps a worker busy, in seconds."""

    mean: float
    tail: float
    """Service time of a request at the objective's percentile, in seconds."""
    variability: float
    """(1 + squared coefficient of variation) / 2: 1 for exponential times, 1/2 for constant ones."""

    @staticmethod
    def of_prompts(demand: ClassDemand, times: FittedStepTimes, percentile: float) -> _Service:
        chunk = max(1.0, times.observed_tokens)

        def seconds(tokens: float) -> float:
            chunks = max(1.0, tokens / chunk)
            return times.fixed * chunks + times.per_token * tokens + times.per_context * tokens * (chunks + 1) / 2

        lengths = demand.prompt_tokens
        mean, tail = lengths.mean * demand.uncached, lengths.percentile(percentile) * demand.uncached
        if not lengths.counts:
            return _Service(0.0, 0.0, 1.0)
        return _Service(seconds(mean), seconds(tail), (1 + lengths.squared_variation) / 2)


def _queue_workers(
    rates: Sequence[float], services: Sequence[_Service], limits: Sequence[tuple[float, float, _Service]]
) -> float:
    """Return the least number of workers that serve these classes in one queue within all limits."""
    if not rates:
        return 0
    busy = math.fsum(rate * service.mean for rate, service in zip(rates, services))
    # The mean remaining time of the request that a worker is computing when another request arrives.
    residual = math.fsum(rate * each.variability * each.mean**2 for rate, each in zip(rates, services)) / busy

    def enough(workers: int) -> bool:
        if busy >= workers * 0.95:
            return False
        chance = erlang_c(workers, busy)
        pause = residual / (workers - busy)
        for percentile, limit, service in limits:
            late = max(0.0, math.log(chance / (1 - percentile))) * pause
            # More workers do not compute a single prompt faster, so a limit below a prompt's own time only bounds the
            # queue. With a few very long prompts, the mean can be above the percentile.
            shortest = max(service.mean, service.tail)
            if max(late + service.mean, chance * pause + service.tail) > max(limit, 1.5 * shortest):
                return False
        return True

    return _least(enough)


def erlang_c(workers: int, busy: float) -> float:
    """Return the probability that an arrival has to wait, by Erlang's formula, if `busy` of `workers` are busy on
    average.
    """
    inverse = 1.0  # of Erlang's B, which is stable to compute
    for count in range(1, workers + 1):
        inverse = 1.0 + inverse * count / busy
        if inverse > 1e12:
            return 1e-12
    blocked = 1 / inverse
    return blocked / (1 - busy / workers * (1 - blocked))


def running_sequences(tokens: float, times: FittedStepTimes, context: float, workers: int = 1) -> tuple[float, float]:
    """Return the average number of sequences that each of `workers` workers runs, and its variance.

    The longer a step takes, the more requests arrive before the running ones have ended. With n sequences, a step makes
    n tokens in fixed + n * slope seconds. Such a queue shares its processor, so n has a negative binomial distribution,
    whatever the distribution of answer lengths is (F. P. Kelly, Reversibility and Stochastic Networks, 1979). Numbers
    vary less if workers share requests equally. For more than one worker, this is an approximation.

    Args:
        tokens: tokens that each worker has to make per second.
        context: tokens of a sequence's KV.
        workers: number of workers that share the requests.

    Returns:
        The mean and the variance. Both are infinite if a worker would be busy for more than 0.9 of its time.
    """
    slope = times.per_token + times.per_context * context
    left = 1 - tokens * slope
    if left <= 1 - _FULL:
        return math.inf, math.inf
    mean = tokens * (times.fixed + slope / workers) / left
    return mean, mean / left / workers


def _least(enough: Callable[[int], bool]) -> int:
    """Return the least number for which `enough` is true; it must be true for all larger ones."""
    high = 1
    while not enough(high) and high < _MOST:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
