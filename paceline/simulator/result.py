"""The result of a simulation, which `to_json` writes as JSON and the report draws."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from paceline.core.planner.actions import Decision
from paceline.core.planner.objectives import Latency
from paceline.simulator.recorder import ClassRecord, Minute


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of times, in seconds; 0 if there are none."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @staticmethod
    def of(times: array[float]) -> Percentiles:
        """Return the percentiles of some times, by nearest rank."""
        if not times:
            return Percentiles(0.0, 0.0, 0.0, 0.0, 0.0)
        ordered = sorted(times)
        at = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.95, 0.99))
        return Percentiles(sum(ordered) / len(ordered), *at)


class MinuteResult(NamedTuple):
    """The requests of one class that arrived in one minute."""

    minute: int
    arrivals: int
    good: int
    refused: int
    finished: int
    ttft_p50: float
    """Percentile of the time to first token, in seconds, at most 4.5 % off; likewise `ttft_p99`."""
    ttft_p99: float
    itl_p50: float
    """Median of the requests' mean times between tokens, in seconds, at most 4.5 % off; likewise `itl_p99`."""
    itl_p99: float


@dataclass(frozen=True, slots=True)
class ClassResult:
    """Counts and times of the requests of one class."""

    requests: int
    finished: int
    refused: int
    refusals: dict[str, int]
    """Number of refused requests by reason: queue_full, priority, overload, timeout, deadline, background, or
    too long."""
    good: int
    """Number of requests that met all objectives of the class: time to first token, and mean time between tokens."""
    attained: float
    """Share of good requests among all requests of the class, from 0 to 1."""
    is_met: bool
    """Whether the share of good requests is at least the objectives' share."""
    goodput: float
    """Good requests of the class per second."""
    hit_rate: float
    """Share of the prompt tokens that first attempts found in the cache, from 0 to 1."""
    prompt_tokens: int
    answer_tokens: int
    attempts: int
    ttft: Percentiles
    itl: Percentiles
    """Percentiles of the time between two tokens, over all tokens of the class."""
    mean_itl: Percentiles
    """Percentiles of the mean time between tokens, over all requests of the class."""
    seconds: Percentiles
    """Percentiles of the time from arrival to end."""
    queued: Percentiles
    """Percentiles of the time from arrival to placement."""
    minutes: list[MinuteResult]


class Level(NamedTuple):
    """The state of the fleet at one instant."""

    at: float
    prefill: int
    """Number of prefill workers that are ready."""
    decode: int
    starting: int
    draining: int
    running: int
    """Number of requests that have arrived and not ended."""
    waiting: int
    """Number of requests for which no worker has room."""
    kv_used: float
    """Share of the blocks of all hosts that requests use."""
    devices: float
    """Number of devices that all workers occupy, including workers that are starting or draining."""
    cost: float
    """Cost of the devices for an hour, in the currency of the profile."""


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one fleet under one load."""

    seconds: float
    """Simulated time until the last request ended, in seconds."""
    prefill: int
    """Number of prefill workers at the beginning."""
    decode: int
    """Number of decode workers at the beginning."""
    is_aggregated: bool
    classes: dict[str, ClassResult]
    device_seconds: float
    """Devices times the seconds for which workers occupied them."""
    cost: float
    """Price of the device-seconds, in the currency of the profile."""
    preemptions: int
    adapter_loads: int
    """Number of times that a worker read an adapter."""
    busy: dict[str, float]
    """For each role, the share of time in which its workers computed, from 0 to 1."""
    levels: list[Level]
    decisions: list[Decision]
    """Decisions of the planner that changed the fleet."""

    @property
    def is_met(self) -> bool:
        """Whether the objectives of all classes are met."""
        return all(each.is_met for each in self.classes.values())

    @property
    def goodput(self) -> float:
        """Good requests per second, over all classes."""
        return sum(each.goodput for each in self.classes.values())

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of all classes that were cached."""
        prompts = sum(each.prompt_tokens for each in self.classes.values())
        return sum(each.prompt_tokens * each.hit_rate for each in self.classes.values()) / max(1, prompts)

    def within(self) -> list[float | None]:
        """Return, for each minute, the share of good requests among the requests that arrived in it; None if none
        arrived.
        """
        arrivals, good = Counter[int](), Counter[int]()
        for class_ in self.classes.values():
            for each in class_.minutes:
                arrivals[each.minute] += each.arrivals
                good[each.minute] += each.good
        return [
            good[minute] / arrivals[minute] if arrivals[minute] else None
            for minute in range(max(arrivals, default=-1) + 1)
        ]

    def to_json(self) -> str:
        """Return the result as the text of a JSON object."""
        return json.dumps({**self.as_dict(), "is_met": self.is_met, "goodput": self.goodput})

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values. Levels and minutes become objects with the names of their fields."""
        values = asdict(self)
        values["levels"] = [level._asdict() for level in self.levels]
        for name, class_ in self.classes.items():
            values["classes"][name]["minutes"] = [minute._asdict() for minute in class_.minutes]
        return values


def class_result(record: ClassRecord, latency: Latency, seconds: float) -> ClassResult:
    """Return the result of one class.

    Args:
        seconds: duration of the whole simulation, in seconds.
    """
    itl = record.itl
    mean = itl.total / itl.count if itl.count else 0.0
    attained = record.good / record.arrivals if record.arrivals else 1.0
    return ClassResult(
        requests=record.arrivals,
        finished=record.finished,
        refused=record.refused,
        refusals=dict(record.reasons),
        good=record.good,
        attained=attained,
        is_met=attained >= latency.percentile,
        goodput=record.good / seconds if seconds else 0.0,
        hit_rate=record.cached_tokens / max(1, record.prompt_tokens),
        prompt_tokens=record.prompt_tokens,
        answer_tokens=record.answer_tokens,
        attempts=record.attempts,
        ttft=Percentiles.of(record.ttft),
        itl=Percentiles(mean, *(itl.percentile(share) for share in (0.5, 0.9, 0.95, 0.99))),
        mean_itl=Percentiles.of(record.mean_itl),
        seconds=Percentiles.of(record.seconds),
        queued=Percentiles.of(record.queued),
        minutes=[_minute_result(minute, seen) for minute, seen in sorted(record.minutes.items())],
    )


def _minute_result(minute: int, seen: Minute) -> MinuteResult:
    times = (each.percentile(share) for each in (seen.ttft, seen.mean_itl) for share in (0.5, 0.99))
    return MinuteResult(minute, seen.arrivals, seen.good, seen.refused, seen.finished, *times)
