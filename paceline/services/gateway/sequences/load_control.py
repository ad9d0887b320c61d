"""The gateway's side of admission control: passes it the demands of sequences and the events of their attempts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from paceline.core.request_classes import NO_CLASSES, Classes
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.queueing.admission_control import AdmissionControl
from paceline.services.gateway.queueing.claim import Demand, QueueClaim
from paceline.services.gateway.queueing.shedding import LoadShedder
from paceline.services.gateway.routing.candidates import Candidate
from paceline.services.gateway.sequences.attempt import Generated
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.kinds import KINDS
from paceline.services.gateway.sequences.sequence import SequenceRun

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
