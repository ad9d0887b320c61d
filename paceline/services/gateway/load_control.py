"""What the gateway measures of the load of its fleet, and what follows for new requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from paceline.core.request_classes import NO_CLASSES, Classes, RequestClass
from paceline.services.gateway.attempt import Generated
from paceline.services.gateway.queueing.claim import Claim, Demand
from paceline.services.gateway.queueing.decode_limits import DecodeLimits
from paceline.services.gateway.queueing.feeding import are_fed
from paceline.services.gateway.queueing.forecast import UsualAnswers
from paceline.services.gateway.queueing.shedding import LoadShedder
from paceline.services.gateway.remote_worker import RemoteWorker
from paceline.services.gateway.router import PREFILL_TOKENS_PER_SECOND, Candidate, Need, usual_rate
from paceline.services.gateway.sequence import SequenceRun
from paceline.services.gateway.traces import AttemptTrace

FED = "all workers that compute prompts have enough of them for now"
LIMITED = "more requests would make tokens come later than the objectives of running requests allow"


class LoadControl:
    """Keeps the load of workers such that objectives can be met.

    Args:
        shedder: gets the times to first token.
        classes: the objectives and weights, by class.
    """

    def __init__(self, shedder: LoadShedder, classes: Classes = NO_CLASSES) -> None:
        self._shedder = shedder
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
            measure=measure,
        )

    def restrict(self, need: Need, snapshot: Sequence[Candidate], decodes: bool) -> tuple[Sequence[Candidate], str]:
        """Return the workers that may get a request now, and why it has to wait; "" if it need not.

        A request that lost its worker must not be restricted, because its client is being served already.

        Args:
            decodes: whether the request needs a decode worker.
        """
        self._prefill_rate = usual_rate(snapshot)
        left = need.prompt_tokens - max(need.cached.values(), default=0)
        if left > need.local_tokens and are_fed(need, snapshot):
            return snapshot, FED
        workers = [c for c in snapshot if c.member.role == "decode"] if decodes else []
        full = {c.member.worker_id for c in workers if not self._limits.has_room(c.member.worker_id, c.requests)}
        if not full:
            return snapshot, ""
        rest = [c for c in snapshot if c.member.worker_id not in full]
        return rest, LIMITED if len(full) == len(workers) else ""

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

    def keep(self, worker_ids: set[str]) -> None:
        """Forget what was measured of all other workers."""
        self._limits.keep(worker_ids)
