"""The life of one sequence: it waits, an attempt runs, and the next attempt goes on if a worker fails or drains.

The gateway owns the sequence. A worker may end at any moment; then a new attempt goes on from the tokens that have come
already. Random numbers of sampling depend on seed and position alone, so the client sees no difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from opentelemetry.trace import get_current_span

from paceline.core.cache_policy.hints import Hint
from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError
from paceline.core.request_classes import NO_CLASSES, Classes
from paceline.services.common.tasks import InUse
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.http.errors import CountRefusal, NoRoomError
from paceline.services.gateway.queueing.admission_queue import AdmissionQueue
from paceline.services.gateway.queueing.worker_wait import WorkerWait
from paceline.services.gateway.routing.prefix_index import PrefixIndex
from paceline.services.gateway.sequences.attempt import AnyAttempt
from paceline.services.gateway.sequences.attempt_starter import AttemptStarter, RunningAttempts
from paceline.services.gateway.sequences.encode_calls import EncodeRefusedError
from paceline.services.gateway.sequences.kinds import KINDS
from paceline.services.gateway.sequences.load import LoadControl, TrafficBook
from paceline.services.gateway.sequences.notices import HintSender, PlacementLog
from paceline.services.gateway.sequences.patience import Patience
from paceline.services.gateway.sequences.progress import (
    AttemptAdmitted,
    EncodingRefused,
    Ended,
    Event,
    Generated,
    HandedOver,
    WorkerLeft,
    WorkerWaited,
)
from paceline.services.gateway.sequences.sequence import SequenceRun
from paceline.services.gateway.sequences.worker_call import WorkerBusyError, WorkerDrainingError, WorkerFailedError

REFUSED_SECONDS = (0.1, 0.4)
"""Shortest and longest delay before the next attempt, in seconds, if no worker had room for an encoding. The delay is
random between the two."""

log = logging.getLogger(__name__)


class SequenceRunner:
    """Runs sequences on the workers of a fleet.

    Args:
        count_refusal: called with the class of a request that is refused, and the reason.
        announce: called when a request begins to wait for a ready worker while no other request does.
        observe_search: called after each search for workers with its CPU time in seconds.
    """

    def __init__(
        self,
        config: GatewayConfig,
        fleet: Fleet,
        placements: PlacementLog,
        prefixes: PrefixIndex,
        classes: Classes = NO_CLASSES,
        *,
        count_refusal: CountRefusal = lambda request_class, reason: None,
        announce: Callable[[], object] = lambda: None,
        observe_search: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._count_refusal = count_refusal
        self.queue = AdmissionQueue(config.max_waiting, config.queue_seconds, count_refusal)
        self._load = LoadControl(self.queue.shedder, fleet, config.queue_seconds, classes)
        self._config = config
        self._fleet = fleet
        self._placements = placements
        self.hints = HintSender(fleet.host)
        self.traffic = TrafficBook()
        self.worker_wait = WorkerWait(fleet, config.max_waiting, config.queue_seconds, count_refusal, announce)
        self.sequences = InUse()
        """Count of the sequences that wait or run."""
        self._background = 0
        """Number of background sequences among these."""
        self._attempts = RunningAttempts()
        self._patience = Patience(config, fleet, self.sequences)
        self.starter = AttemptStarter(
            config, fleet, prefixes, self._load.control, self._patience, self._attempts, observe_search
        )

    @property
    def client_sequences(self) -> int:
        """Number of sequences that wait or run for clients; background sequences do not count."""
        return self.sequences.count - self._background

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for a worker, plus requests that wait for one before they can be planned."""
        return len(self.queue) + len(self.worker_wait)

    @property
    def running(self) -> int:
        """Number of sequences that workers have admitted and that have not ended."""
        return self.sequences.count - (self.waiting - self.traffic.unplanned_requests)

    def abort(self) -> None:
        """End all attempts. Each sequence fails with UnavailableError."""
        self._patience.abort()
        self.worker_wait.abort()
        self._attempts.close()
        self.queue.wake()

    async def run(self, sequence: SequenceRun, take: Callable[[Event], object]) -> None:
        """Run a sequence and call `take` with each event; the last one is Ended. An error of `take` ends the sequence.

        Raises:
            InvalidRequestError: no worker can ever serve this sequence.
            BusyError: no worker had room in time.
            UnavailableError: no worker was ready in time, the sequence failed too often or took too long, or the
                gateway ends.
        """
        with self.sequences.running(), self._counted(sequence), self.traffic.counted(sequence):
            while True:
                attempt = await self._admit(sequence)
                is_refused = False
                try:
                    await attempt.run(partial(self._hear, sequence, attempt, take))
                    self._load.end(sequence)
                    self.starter.note_end(sequence)
                    return
                except WorkerDrainingError as error:
                    attempt.attempt_trace.end("failed", str(error))
                    sequence.advance(WorkerLeft(error.worker.member.worker_id))
                except EncodeRefusedError as error:
                    attempt.attempt_trace.end("failed", str(error))
                    is_refused = True
                except (WorkerFailedError, WorkerBusyError) as error:
                    attempt.attempt_trace.end("failed", str(error))
                    if isinstance(error, WorkerBusyError):
                        # A worker that admitted the attempt and then reports busy has failed.
                        error = WorkerFailedError(str(error), error.worker, unreachable=False)
                    self._patience.note(error, sequence, attempt.attempt_trace)
                finally:
                    self._attempts.discard(attempt)
                    self.queue.wake()
                if finish := sequence.end():
                    take(Ended(finish))
                    return
                if is_refused:
                    await self._wait_for_encoder(sequence)
                self._patience.check(sequence)

    @contextlib.contextmanager
    def _counted(self, sequence: SequenceRun) -> Iterator[None]:
        self._background += sequence.plan.background
        try:
            yield
        finally:
            self._background -= sequence.plan.background

    async def _wait_for_encoder(self, sequence: SequenceRun) -> None:
        """Wait before the next attempt. Raises BusyError if workers have refused an encoding for too long."""
        now = time.monotonic()
        sequence.advance(EncodingRefused(now))
        if now >= (sequence.progress.refused_since or now) + self._config.queue_seconds:
            message = (
                f"the server is busy: no worker had room for an image, a video or an audio clip within "
                f"{self._config.queue_seconds:g} seconds; try again later"
            )
            self._count_refusal(sequence.plan.request_class, "timeout")
            raise NoRoomError(message, "timeout")
        await asyncio.sleep(random.uniform(*REFUSED_SECONDS))

    def expect(self, sequence: SequenceRun, hints: Sequence[Hint]) -> None:
        """Send hints about the next use of a sequence's context to the hosts on which the sequence has run."""
        if hints:
            self.hints.put(self._fleet.layouts_of(sequence.trace.workers), sequence.context, hints)

    def _hear(self, sequence: SequenceRun, attempt: AnyAttempt, take: Callable[[Event], object], event: Event) -> None:
        self._patience.hear(event)
        if isinstance(event, Generated) and not sequence.generated:
            self.starter.note_prompt(sequence)
        fresh = sequence.note(event, attempt.attempt_trace)
        self._load.hear(sequence, attempt.decode, attempt.attempt_trace, event)
        if fresh is not None:
            take(fresh)
        if isinstance(event, HandedOver):
            self.queue.wake()

    def follow_fleet(self) -> None:
        """Act on changes of the fleet, such as draining workers. Call this after each refresh of the fleet."""
        self._load.control.keep(self._fleet.worker_ids())
        self._attempts.leave_draining_workers(self._fleet)

    async def _admit(self, sequence: SequenceRun) -> AnyAttempt:
        """Return an attempt that workers have admitted. Waits in the queue if there is no room."""
        span, plan, trace = get_current_span(), sequence.plan, sequence.trace
        span.add_event("queue")
        trace.begin_attempt(len(self.queue))
        deadline = self._patience.begin_attempt(sequence)
        claim = self._load.claim(sequence, lambda: self.starter.cached_tokens(sequence), deadline)
        waited = await self.worker_wait.until_ready(
            deadline,
            decodes=KINDS[plan.kind].decodes,
            request_class=plan.request_class,
            is_ordinary=claim.is_ordinary,
            waited=sequence.progress.waited,
        )
        sequence.advance(WorkerWaited(waited))
        since = time.monotonic()
        try:
            # The queue refuses an ordinary request before its deadline comes.
            async with asyncio.timeout(None if claim.is_ordinary else deadline - time.monotonic()):
                attempt: AnyAttempt = await self.queue.admit(
                    lambda: self.starter.try_to_start(sequence, deadline, time.monotonic() - since), claim
                )
        except TimeoutError:
            raise self._patience.too_late(sequence) from None
        except BusyError as error:
            if sequence.progress.unreachable_since is None and self.starter.fits(sequence):
                raise
            raise sequence.unreachable() from error
        attempt_trace, number = attempt.attempt_trace, sequence.progress.attempts
        prefill, decode = attempt_trace.worker_ids
        span.add_event("admitted", {"prefill": prefill, "decode": decode, "attempt": number})
        if changes := attempt_trace.numerics_changes:
            span.add_event("numerics changed", changes)
            told = "; ".join(f"{step}: {change}" for step, change in changes.items())
            log.info("attempt %d goes on with other numerics: %s", number, told)
        sequence.advance(AttemptAdmitted())
        attempt_trace.admitted = time.monotonic()
        self._placements.put(sequence.request_id, *trace.workers, trace.attempts)
        return attempt
