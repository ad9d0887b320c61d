"""What the gateway measures of the load of its fleet, and what follows for new requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set

from paceline.core.request_classes import NO_CLASSES, Classes, RequestClass
from paceline.services.gateway.attempt import Generated
from paceline.services.gateway.fleet import Fleet
from paceline.services.gateway.queueing.claim import Claim, Demand
from paceline.services.gateway.queueing.decode_limits import DecodeLimits
from paceline.services.gateway.queueing.feeding import are_fed, is_fed
from paceline.services.gateway.queueing.forecast import UsualAnswers
from paceline.services.gateway.queueing.shedding import LoadShedder
from paceline.services.gateway.remote_worker import RemoteWorker
from paceline.services.gateway.router import PREFILL_TOKENS_PER_SECOND, Candidate, Need, Placement
from paceline.services.gateway.sequence import SequenceRun
from paceline.services.gateway.traces import AttemptTrace

PREMATURE = "all workers that compute prompts have enough of them for now"
FULL = "more requests would make tokens come later than the objectives of running ones allow"


class LoadControl:
    """Keeps the load of workers such that objectives can be met.

    Args:
        shedder: gets the times to first token.
        fleet: the workers.
        hold_seconds: longest time for which a request is held back although a worker has room, if there are no classes.
        classes: the objectives and weights, by class.
    """

    def __init__(self, shedder: LoadShedder, fleet: Fleet, hold_seconds: float, classes: Classes = NO_CLASSES) -> None:
        self._shedder = shedder
        self._fleet = fleet
        # Without classes, a request that a worker has room for must not be refused after a wait for its turn.
        self._hold_seconds = hold_seconds if classes is NO_CLASSES else float("inf")
        self._classes = classes
        self._limits = DecodeLimits()
        self._answers = UsualAnswers()
        self._prefill_rate = PREFILL_TOKENS_PER_SECOND
        """Tokens per second that a worker computes of prompts, as they were reported last."""

    def class_of(self, sequence: SequenceRun) -> RequestClass:
        """Return the class of a sequence. A class that does not exist any more has no objectives."""
        return self._classes.get(sequence.request_class, RequestClass())

    def claim(self, sequence: SequenceRun, cached: Callable[[], Mapping[str, int]], deadline: float) -> Claim:
        """Return what a sequence tells the queue.

        Args:
            cached: returns for each host id how many of its tokens are cached there.
            deadline: when the sequence is given up, on time.monotonic().
        """
        again = sequence.trace.attempts > 0

        def measure() -> Demand:
            uncached = len(sequence.context.token_ids) - max(cached().values(), default=0)
            wanted, max_tokens = self.class_of(sequence), sequence.sampling.max_tokens
            limits = [each for each in (wanted.ttft_seconds, sequence.ttft_seconds) if each is not None]
            return Demand(
                work=uncached + self._answers.tokens(sequence.owner, max_tokens - len(sequence.generated)),
                prompt_seconds=uncached / self._prefill_rate,
                first_token_by=sequence.trace.arrived + min(limits) if limits else None,
                percentile=wanted.percentile,
                deadline=deadline,
                fingerprint=hash((sequence.owner, sequence.cache_salt, max_tokens, tuple(sequence.prompt_ids))),
            )

        return Claim(
            owner=sequence.owner,
            weight=self.class_of(sequence).weight,
            priority=sequence.priority,
            request_class=sequence.request_class,
            first=again,
            patient=sequence.follows and not again,
            background=sequence.background,
            is_stranded=lambda: sequence.unreachable_since is not None and self._fleet.has_decode_worker,
            measure=measure,
        )

    def full_workers(self) -> frozenset[str]:
        """Return the ids of decode workers that must not get more requests, so that objectives of running ones hold.

        A request that lost its worker may go to them all the same, because its client is being served already.
        """
        limited = self._limits.limited()
        return frozenset(
            worker_id
            for worker_id, worker in self._workers(limited)
            if not self._limits.has_room(worker_id, worker.candidate(0.0).requests)
        )

    def is_premature(self, need: Need, placement: Placement, snapshot: Iterable[Candidate], waited: float) -> bool:
        """Return whether a prompt has to wait here, because the worker of its placement and all others have enough.

        Args:
            waited: seconds since the request began to wait.
        """
        if waited > self._hold_seconds:
            return False
        computing = placement.computing
        self._prefill_rate = computing.load.prefill_tokens_per_second or self._prefill_rate
        left = need.prompt_tokens - max(need.cached.values(), default=0)
        # Usually the worker of the placement has little to do, and the others need not be looked at.
        own = (worker.candidate(0.0) for _, worker in self._workers((computing.worker_id,)))
        return left > need.local_tokens and all(map(is_fed, own)) and are_fed(need, snapshot)

    def _workers(self, worker_ids: Iterable[str]) -> Iterator[tuple[str, RemoteWorker]]:
        for worker_id in worker_ids:
            if (worker := self._fleet.find(worker_id)) is not None:
                yield worker_id, worker

    def hear(self, sequence: SequenceRun, worker: RemoteWorker | None, record: AttemptTrace, event: object) -> None:
        """Measure an event of an attempt, after `sequence` has noted it.

        Args:
            worker: the decode worker; None if there is none.
        """
        if not isinstance(event, Generated):
            return
        times, now = record.token_times, time.monotonic()
        if len(times) == 1 and record is sequence.trace.tries[0] and record.admitted is not None:
            prompt_seconds = (record.context_tokens - record.cached_tokens) / self._prefill_rate
            self._shedder.first_tokens.note(now - record.admitted, prompt_seconds, now)
        wanted = self.class_of(sequence)
        # The gap before the decode worker's first tokens is the handoff.
        if worker is not None and wanted.itl_seconds is not None and len(times) > 1 + (record.prefill is not None):
            gap = times[-1] - times[-2]
            requests = max(worker.in_flight, worker.member.load.running)
            self._limits.note(worker.member.worker_id, requests, gap, wanted.itl_seconds, wanted.percentile, now)

    def end(self, sequence: SequenceRun) -> None:
        """Measure a sequence that has ended with its whole answer."""
        self._answers.note(sequence.owner, len(sequence.generated))

    def keep(self, worker_ids: Set[str]) -> None:
        """Forget what was measured of all other workers."""
        self._limits.keep(worker_ids)
