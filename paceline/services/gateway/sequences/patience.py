"""The rules by which the gateway gives up a sequence, and the errors that say why a sequence was given up."""

from __future__ import annotations

import logging
import time

from paceline.core.config import GatewayConfig
from paceline.core.errors import UnavailableError
from paceline.services.common.tasks import InUse
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.http.errors import LeavingError
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.progress import (
    AttemptFailed,
    AttemptQueued,
    Cause,
    Event,
    Failure,
    Generated,
    PooledRows,
)
from paceline.services.gateway.sequences.sequence import SequenceRun
from paceline.services.gateway.sequences.worker_call import WorkerDrainingError, WorkerFailedError

BACKGROUND_SECONDS = 86400.0
"""Longest life of a background sequence, in seconds. Its caller, such as a batch, has a deadline of its own."""

log = logging.getLogger(__name__)


def life_seconds(request_seconds: float, wanted: float | None, background: bool) -> float:
    """Return the longest life of a request from its arrival, in seconds.

    Args:
        request_seconds: longest life of any client's request, in seconds.
        wanted: seconds after which the client gives up; None if the client did not say.
        background: whether it is a background request, which no client waits for.
    """
    if background:
        return BACKGROUND_SECONDS
    return request_seconds if wanted is None else min(request_seconds, wanted)


class Patience:
    """Decides which sequences of one gateway are given up, and when. Deadlines are on time.monotonic().

    Args:
        sequences: the counter of sequences that this gateway runs.
    """

    def __init__(self, config: GatewayConfig, fleet: Fleet, sequences: InUse) -> None:
        self._config = config
        self._fleet = fleet
        self._sequences = sequences
        self._aborted = False
        self._heard = 0
        """Number of tokens, and of results of pooled inputs, that have come from workers since the start."""

    def abort(self) -> None:
        """Let all sequences end: `check` raises LeavingError from now on."""
        self._aborted = True

    def hear(self, event: Event) -> None:
        """Count the results in an event from a worker, because they show that sequences make progress."""
        if isinstance(event, Generated):
            self._heard += len(event.tokens)
        elif isinstance(event, PooledRows):
            self._heard += len(event.inputs)

    def begin_attempt(self, sequence: SequenceRun) -> float:
        """Note that an attempt begins. Return the instant at which the sequence is given up."""
        sequence.advance(AttemptQueued(self._heard_of_others(sequence)))
        return self._deadline(sequence)

    def note(
        self, error: WorkerFailedError, sequence: SequenceRun, attempt_trace: AttemptTrace, *, begun: bool = True
    ) -> None:
        """Record a failed attempt of a sequence.

        Args:
            begun: whether a worker may have begun the attempt. Otherwise the failure does not count.
        """
        worker, progress = error.worker.member.worker_id, sequence.progress
        failure = Failure(
            sequence.step(attempt_trace),
            _cause(error, begun),
            others_ended=self._fleet.ends.any_since(
                progress.failed_at, others_than={*attempt_trace.worker_ids, worker, progress.failed_on}
            ),
            others_went_on=self._sequences.count == 1 or self._heard_of_others(sequence) > progress.heard_before,
        )
        if error.link is not None:
            self._fleet.avoid_link(error.link)
        if error.unreachable:
            self._fleet.set_aside(error.worker)
        is_of_link = error.link is not None
        sequence.advance(AttemptFailed(time.monotonic(), failure, worker, str(error), is_of_link))
        if not self._aborted:
            log.warning("attempt %d failed %s: %s", progress.attempts, sequence.place(), error)

    def check(self, sequence: SequenceRun) -> None:
        """Raise UnavailableError if the sequence has to be given up now, and LeavingError if the gateway ends."""
        if self._aborted:
            raise LeavingError
        progress, now = sequence.progress, time.monotonic()
        if now >= self._deadline(sequence):
            raise self.too_late(sequence)
        if (count := progress.failures.count) >= self._config.max_attempts:
            times = "once" if count == 1 else f"{count} times at the same step"
            message = f"the request was given up because it failed {times}, {sequence.place()}"
            raise UnavailableError(f"{message}; the last time: {progress.last_failure}")
        # A request that has begun waits for workers until its deadline, because they may be coming back. Workers with
        # weights that were replaced do not.
        waits = sequence.trace.admitted is not None and not progress.is_left_behind
        since = progress.unreachable_since
        if since is not None and not waits and now >= since + self._config.queue_seconds:
            raise sequence.unreachable()

    def too_late(self, sequence: SequenceRun) -> UnavailableError:
        """Return the error for a sequence whose deadline has come."""
        message = f"the request took longer than {self._seconds(sequence):g} seconds"
        reason = sequence.progress.last_failure
        return UnavailableError(message if not reason else f"{message}; the last failure: {reason}")

    def _deadline(self, sequence: SequenceRun) -> float:
        return sequence.trace.arrived + self._seconds(sequence)

    def _seconds(self, sequence: SequenceRun) -> float:
        return life_seconds(self._config.request_seconds, sequence.plan.seconds, sequence.plan.background)

    def _heard_of_others(self, sequence: SequenceRun) -> int:
        return self._heard - sequence.results


def _cause(error: WorkerFailedError, begun: bool) -> Cause:
    drains = isinstance(error, WorkerDrainingError) or error.worker.member.state == "draining"
    if error.link is not None or drains or (error.unreachable and not begun):
        return Cause.ELSEWHERE
    return Cause.WORKER_ENDED if error.unreachable or error.lost_blocks else Cause.REQUEST
