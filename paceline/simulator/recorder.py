"""The measurements of a simulation: the times of every request and token, by class and by minute."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.core.planner.distribution import Distribution
from paceline.core.planner.objectives import Objectives
from paceline.core.step_times import Delay
from paceline.simulator.sequence import Sequence
from paceline.simulator.series import ratios_of
from paceline.simulator.steps import Run
from paceline.simulator.worker import SimulatedWorker

MINUTE = 60.0
_OWN_SEEDS = 1 << 20
"""Added to a scenario's seed, so that no other series has the seed of the tokens' delays."""

_WIDTH = math.log(1.01)
_LEAST = math.log(1e-5)
_BUCKETS = 2400
"""Buckets of 1 % from 10 microseconds to several hours."""


class Times:
    """A histogram of seconds in buckets that are 1 % wide."""

    def __init__(self) -> None:
        self._counts: NDArray[np.float64] = np.zeros(_BUCKETS)
        self.count = 0.0
        self.total = 0.0

    def add(self, seconds: float, times: float = 1.0) -> None:
        """Count one duration, in seconds, `times` times."""
        bucket = int((math.log(max(seconds, 1e-5)) - _LEAST) / _WIDTH)
        self._counts[min(bucket, _BUCKETS - 1)] += times
        self.count += times
        self.total += seconds * times

    def add_all(self, seconds: NDArray[np.float64], times: float) -> None:
        """Count several durations, in seconds, each of them `times` times."""
        buckets = ((np.log(np.maximum(seconds, 1e-5)) - _LEAST) / _WIDTH).astype(np.intp)
        np.add.at(self._counts, np.minimum(buckets, _BUCKETS - 1), times)
        self.count += times * len(seconds)
        self.total += times * float(seconds.sum())

    @staticmethod
    def merged(parts: Iterable[Times]) -> Times:
        """Return one histogram with the durations of all `parts`."""
        whole = Times()
        for part in parts:
            whole._counts += part._counts
            whole.count += part.count
            whole.total += part.total
        return whole

    def percentile(self, share: float) -> float:
        """Return the percentile at `share` (0 to 1) in seconds, at most 0.5 % off; 0 if nothing was counted."""
        if not self.count:
            return 0.0
        bucket = int(np.searchsorted(np.cumsum(self._counts), share * self.count - 1e-9))
        return 0.0 if bucket == 0 else math.exp(_LEAST + (min(bucket, _BUCKETS - 1) + 0.5) * _WIDTH)


@dataclass(slots=True)
class Minute:
    """The requests of one class that arrived in one minute."""

    arrivals: int = 0
    finished: int = 0
    good: int = 0
    """Number of requests that met all objectives of their class."""
    refused: int = 0
    ttft: Distribution = field(default_factory=Distribution)
    mean_itl: Distribution = field(default_factory=Distribution)


@dataclass(slots=True)
class ClassRecord:
    """Counts and times of the requests of one class."""

    arrivals: int = 0
    finished: int = 0
    good: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of refused requests by reason; `queueing/shedding.py` has the reasons."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that first attempts found in the cache."""
    answer_tokens: int = 0
    attempts: int = 0
    ttft: array[float] = field(default_factory=lambda: array("d"))
    queued: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from arrival to the first placement, one value for each request whose first attempt has begun."""
    mean_itl: array[float] = field(default_factory=lambda: array("d"))
    """Mean time between tokens of each request with at least two tokens, in seconds."""
    seconds: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from arrival to end, one value for each finished request."""
    itl: Times = field(default_factory=Times)
    minutes: defaultdict[int, Minute] = field(default_factory=lambda: defaultdict(Minute))


@dataclass(slots=True)
class Recent:
    """The traffic of one class since the planner's last report."""

    arrivals: int = 0
    finished: int = 0
    refused: int = 0
    cached_tokens: int = 0
    started_tokens: int = 0
    prompts: Distribution = field(default_factory=Distribution)
    answers: Distribution = field(default_factory=Distribution)
    ttft: Distribution = field(default_factory=Distribution)
    itl: Distribution = field(default_factory=Distribution)


class SimulationRecorder:
    """Collects the measurements of a simulation.

    Args:
        token: delay from the end of a step until clients have the step's tokens.
        watches: whether a planner reads the recent traffic (`Recent`).
        seed: seed of the order in which the values of the delay `token` come.
    """

    def __init__(self, objectives: Objectives, token: Delay, watches: bool = False, seed: int = 0) -> None:
        self.classes: dict[str, ClassRecord] = {}
        self.recent: dict[str, Recent] = {}
        self.preemptions = 0
        self._objectives = objectives
        self._token_seconds = token.seconds
        # Series with equal seeds have equal orders. With the seed of the steps, delays would be correlated with their
        # times.
        self.token_ratios = ratios_of(token.spread, seed + _OWN_SEEDS)
        self._delivered: dict[int, float] = {}
        """Instant at which clients had the newest token of each worker, by its number."""
        self._watches = watches

    def of(self, group: str) -> ClassRecord:
        if group not in self.classes:
            self.classes[group] = ClassRecord()
            self.recent[group] = Recent()
        return self.classes[group]

    def take_recent(self) -> dict[str, Recent]:
        """Return the traffic since the last call, by class."""
        recent, self.recent = self.recent, {group: Recent() for group in self.classes}
        return recent

    def arrived(self, sequence: Sequence) -> None:
        record = self.of(sequence.group)
        record.arrivals += 1
        record.minutes[int(sequence.arrival / MINUTE)].arrivals += 1
        if self._watches:
            recent = self.recent[sequence.group]
            recent.arrivals += 1
            recent.prompts.add(sequence.prompt_tokens)

    def started(self, sequence: Sequence, now: float) -> None:
        """Count an attempt that has got its blocks. For a first attempt, also count its cached tokens and its wait."""
        record = self.of(sequence.group)
        record.attempts += 1
        sequence.starts += 1
        if sequence.first_cached < 0:
            sequence.first_cached = sequence.cached
            record.prompt_tokens += sequence.prompt_tokens
            record.cached_tokens += sequence.cached
            record.queued.append(sequence.placed - sequence.arrival)
            recent = self.recent[sequence.group]
            recent.cached_tokens += sequence.cached
            recent.started_tokens += sequence.prompt_tokens

    def first_token(self, sequence: Sequence, at: float) -> None:
        """Count the first token of an attempt, which the client gets at the instant `at`."""
        record = self.of(sequence.group)
        if sequence.first_token < 0:
            sequence.first_token = at
            record.ttft.append(at - sequence.arrival)
            if self._watches:
                self.recent[sequence.group].ttft.add(at - sequence.arrival)
        else:
            self._gap(sequence, at)
        sequence.last_token = at

    def stepped(self, worker: SimulatedWorker, run: Run) -> None:
        """Count the tokens that steps gave to decoding sequences."""
        if not run.rows:
            return
        delays = self._token_seconds * self.token_ratios.values(run.index, run.steps)
        ends = run.begin - run.waited + np.cumsum(run.gaps())
        before = self._delivered.get(worker.number, 0.0)
        # Tokens come in order, so a late one holds back the next ones.
        instants = np.maximum.accumulate(np.concatenate(([before], ends + delays)))
        gaps = np.diff(instants)
        given, self._delivered[worker.number] = float(instants[1]), float(instants[-1])
        joined: dict[str, int] = {}
        for sequence in run.joined:
            self._gap(sequence, given)
            sequence.last_token = given
            joined[sequence.group] = joined.get(sequence.group, 0) + 1
        more = worker.kit.yields.mean - 1
        for group, rows in run.by_group.items():
            if rows:
                gaps_seen = self.of(group).itl
                gaps_seen.add(float(gaps[0]), rows - joined.get(group, 0))
                if run.steps > 1:
                    gaps_seen.add_all(gaps[1:], rows)
                if more:
                    gaps_seen.add(0.0, rows * run.steps * more)
                if self._watches:
                    self.recent[group].itl.add((run.waited + run.seconds(run.steps)) / run.steps, rows * run.steps)

    def _gap(self, sequence: Sequence, at: float) -> None:
        self.of(sequence.group).itl.add(max(0.0, at - sequence.last_token))
        if self._watches:
            self.recent[sequence.group].itl.add(max(0.0, at - sequence.last_token))

    def ended(self, sequence: Sequence, at: float) -> None:
        """Count a finished request, whose last token the client gets at the instant `at`."""
        record, limits = self.of(sequence.group), self._objectives.latency(sequence.group)
        ttft = sequence.first_token - sequence.arrival
        itl = (at - sequence.first_token) / max(1, sequence.answer_tokens - 1)
        record.finished += 1
        record.answer_tokens += sequence.answer_tokens
        record.seconds.append(at - sequence.arrival)
        if sequence.answer_tokens > 1:
            record.mean_itl.append(itl)
        is_good = (limits.ttft is None or ttft <= limits.ttft) and (limits.itl is None or itl <= limits.itl)
        minute = record.minutes[int(sequence.arrival / MINUTE)]
        minute.finished += 1
        minute.ttft.add(ttft)
        minute.mean_itl.add(max(0.0, itl))
        minute.good += is_good
        record.good += is_good
        if self._watches:
            recent = self.recent[sequence.group]
            recent.finished += 1
            recent.answers.add(sequence.answer_tokens)

    def refused(self, sequence: Sequence, reason: str) -> None:
        """Count a request that was refused, or that no worker can ever take."""
        record = self.of(sequence.group)
        record.refused += 1
        record.reasons[reason] += 1
        record.minutes[int(sequence.arrival / MINUTE)].refused += 1
        self.recent[sequence.group].refused += 1
