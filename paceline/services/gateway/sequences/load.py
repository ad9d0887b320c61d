"""The load of sequences, measured for admission control, and counted for the planner."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from paceline.core.errors import BusyError, UnavailableError
from paceline.core.planner.distribution import Distribution
from paceline.core.request_classes import DEFAULT, NO_CLASSES, Classes
from paceline.proto.fleet_pb2 import ClassTraffic, TrafficReport
from paceline.services.common.wire import distribution_to_pb
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.queueing.admission_control import AdmissionControl
from paceline.services.gateway.queueing.fair_order import Demand, QueueClaim
from paceline.services.gateway.queueing.shedding import LoadShedder
from paceline.services.gateway.routing.candidates import Candidate
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.kinds import KINDS
from paceline.services.gateway.sequences.progress import Generated
from paceline.services.gateway.sequences.sequence import SequenceRun

MOST_CLASSES = 16
"""Largest number of classes that are counted separately. Requests of further classes count as the default class."""


@dataclass(slots=True)
class _Totals:
    """The totals of one class."""

    arrivals: int = 0
    finished: int = 0
    refused: int = 0
    media_items: int = 0
    started_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: Distribution = field(default_factory=Distribution)
    answer_tokens: Distribution = field(default_factory=Distribution)
    ttft: Distribution = field(default_factory=Distribution)
    itl: Distribution = field(default_factory=Distribution)


@dataclass(slots=True, eq=False)
class _Running:
    """A sequence that has not ended, and the part of its trace that is counted already."""

    sequence: SequenceRun
    totals: _Totals
    is_admitted: bool = False
    attempt: int = 0
    """Index of the attempt whose tokens are counted next. `messages` of its messages are counted already."""
    messages: int = 0
    last: float | None = None
    """Instant at which the newest counted message came, on time.monotonic(); None if no message is counted yet."""

    def waits_since(self) -> float | None:
        """Return the instant at which the sequence began to wait for a worker; None if it does not wait."""
        tries = self.sequence.trace.tries
        if not tries:
            return self.sequence.trace.arrived
        return tries[-1].queued if tries[-1].admitted is None else None

    def count(self) -> None:
        """Count new entries of the trace, so that the latencies of a long answer count before the answer ends."""
        trace, totals = self.sequence.trace, self.totals
        if not self.is_admitted and trace.admitted is not None:
            self.is_admitted = True
            totals.started_tokens += trace.prompt_tokens
            totals.cached_tokens += trace.cached_tokens
        while self.attempt < len(trace.tries):
            times = trace.tries[self.attempt].token_times
            for at in times[self.messages :]:
                if self.last is None:
                    totals.ttft.add(at - trace.arrived)
                else:
                    totals.itl.add(at - self.last)
                self.last = at
            self.messages = len(times)
            if self.attempt == len(trace.tries) - 1:
                return
            self.attempt, self.messages = self.attempt + 1, 0


class TrafficBook:
    """The totals of all classes, and the sequences that wait or run."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._classes: dict[str, _Totals] = {DEFAULT: _Totals()}
        self._running: set[_Running] = set()
        self._unplanned: dict[object, float] = {}
        """Instant at which each unplanned request began to wait for a worker, on time.monotonic()."""

    @contextlib.contextmanager
    def counted(self, sequence: SequenceRun) -> Iterator[None]:
        """Count a sequence while the context is open: its arrival, its latencies and its end."""
        running = _Running(sequence, self._totals(sequence))
        totals = running.totals
        totals.arrivals += 1
        totals.prompt_tokens.add(len(sequence.prompt.token_ids))
        totals.media_items += len(sequence.prompt.media)
        self._running.add(running)
        began = time.monotonic()
        is_refused = False
        try:
            yield
            if sequence.prompt.pool is not None:
                # A large request waits for its own earlier bundles, so each counts from its own begin.
                totals.ttft.add(time.monotonic() - began)
        except (BusyError, UnavailableError):
            is_refused = sequence.trace.admitted is None
            raise
        finally:
            self._running.discard(running)
            running.count()
            totals.refused += is_refused
            totals.finished += not is_refused
            if not is_refused:
                totals.answer_tokens.add(len(sequence.generated))

    @contextlib.contextmanager
    def unplanned(self) -> Iterator[None]:
        """Count a request as waiting, while the context is open, that cannot be planned before a worker is ready: the
        worker determines how long a context may be."""
        token = object()
        self._unplanned[token] = time.monotonic()
        try:
            yield
        finally:
            del self._unplanned[token]

    @property
    def unplanned_requests(self) -> int:
        """Number of requests that wait for a worker before they can be planned."""
        return len(self._unplanned)

    def adapters(self) -> tuple[Counter[str], Counter[str]]:
        """Return the number of sequences that run with each adapter, and of those that wait, by the adapter's name."""
        running, waiting = Counter[str](), Counter[str]()
        for each in self._running:
            if (adapter := each.sequence.plan.adapter) is not None:
                (running if each.waits_since() is None else waiting)[adapter.name] += 1
        return running, waiting

    def report(self) -> TrafficReport:
        """Return all totals since the start, with the number of sequences of each class that wait now."""
        now = time.monotonic()
        for running in self._running:
            running.count()
        classes = [self._describe(name, totals, now) for name, totals in self._classes.items()]
        return TrafficReport(seconds=now - self._began, classes=classes)

    def _totals(self, sequence: SequenceRun) -> _Totals:
        name = sequence.plan.request_class
        if name not in self._classes and len(self._classes) < MOST_CLASSES:
            self._classes[name] = _Totals()
        return self._classes.get(name, self._classes[DEFAULT])

    def _describe(self, name: str, totals: _Totals, now: float) -> ClassTraffic:
        since = [at for running in self._running if running.totals is totals and (at := running.waits_since())]
        since += self._unplanned.values() if name == DEFAULT else ()
        return ClassTraffic(
            name=name,
            arrivals=totals.arrivals,
            finished=totals.finished,
            refused=totals.refused,
            waiting=len(since),
            oldest_wait_seconds=now - min(since, default=now),
            prompt_tokens=distribution_to_pb(totals.prompt_tokens),
            started_tokens=totals.started_tokens,
            cached_tokens=totals.cached_tokens,
            answer_tokens=distribution_to_pb(totals.answer_tokens),
            media_items=totals.media_items,
            ttft=distribution_to_pb(totals.ttft),
            itl=distribution_to_pb(totals.itl),
        )


PREMATURE = "all workers that compute prompts have enough of them for now"
FULL = "more requests would make tokens come later than the objectives of running ones allow"


class LoadControl:
    """Makes the claims of sequences on the queue, and measures their attempts for admission control.

    Args:
        shedder: the load shedder, to which measured times to first token are passed.
        fleet: the workers.
        queue_seconds: longest wait in the queue, in seconds.
        classes: objectives and weights of each request class.
    """

    def __init__(self, shedder: LoadShedder, fleet: Fleet, queue_seconds: float, classes: Classes = NO_CLASSES) -> None:
        self._fleet = fleet
        self.control = AdmissionControl(shedder, self._find, queue_seconds, classes)

    def _find(self, worker_id: str) -> Candidate | None:
        worker = self._fleet.find(worker_id)
        return None if worker is None else worker.candidate(0.0)

    def claim(self, sequence: SequenceRun, cached: Callable[[], Mapping[str, int]], deadline: float) -> QueueClaim:
        """Return a sequence's claim on the queue.

        Args:
            cached: a function that returns how many tokens of the sequence each host has cached, by host id.
            deadline: instant at which the sequence is given up, on time.monotonic().
        """
        again = sequence.trace.admitted is not None
        plan, prompt = sequence.plan, sequence.prompt
        decodes = KINDS[plan.kind].decodes

        def measure() -> Demand:
            max_tokens = prompt.sampling.max_tokens
            return self.control.demand(
                request_class=plan.request_class,
                owner=plan.owner,
                uncached=len(sequence.context.token_ids) - max(cached().values(), default=0),
                max_tokens=max_tokens - len(sequence.generated),
                arrived=sequence.trace.arrived,
                deadline=deadline,
                fingerprint=hash(
                    (plan.owner, plan.cache_salt, plan.adapter_digest, max_tokens, tuple(prompt.token_ids))
                ),
                ttft_seconds=plan.ttft_seconds,
                waited=sequence.progress.waited,
            )

        return QueueClaim(
            owner=plan.owner,
            weight=self.control.class_of(plan.request_class).weight,
            priority=plan.priority,
            request_class=plan.request_class,
            first=again,
            patient=sequence.follows and not again,
            background=plan.background,
            is_stranded=lambda: sequence.progress.unreachable_since is not None and self._fleet.has_worker(decodes),
            measure=measure,
        )

    def hear(
        self, sequence: SequenceRun, worker: RemoteWorker | None, attempt_trace: AttemptTrace, event: object
    ) -> None:
        """Pass the measurements of an attempt's event to admission control. Call this after `SequenceRun.note`.

        Args:
            worker: the decode worker; None if the work needs no decoding.
        """
        if not isinstance(event, Generated):
            return
        times, now = attempt_trace.token_times, time.monotonic()
        if len(times) == 1 and attempt_trace is sequence.trace.tries[0] and attempt_trace.admitted is not None:
            uncached = attempt_trace.context_tokens - attempt_trace.cached_tokens
            self.control.note_first_token(now - attempt_trace.admitted, uncached, now)
        # The gap before the decode worker's first tokens is the handoff.
        if worker is not None and len(times) > 1 + (attempt_trace.prefill is not None):
            requests = max(worker.in_flight, worker.member.load.running)
            gap = times[-1] - times[-2]
            self.control.note_gap(worker.member.worker_id, requests, gap, sequence.plan.request_class, now)

    def end(self, sequence: SequenceRun) -> None:
        """Pass the length of a complete answer to admission control. Call this when the sequence has ended."""
        if sequence.prompt.pool is not None:
            return  # it is no answer, and would make the expected ones shorter
        self.control.note_answer(sequence.plan.owner, len(sequence.generated))
