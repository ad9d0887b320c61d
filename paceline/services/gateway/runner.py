"""The life of one request: waiting, attempts, and going on where a worker failed.

The gateway owns the request. A worker may die at any moment; then a new attempt starts from the tokens that have
already come, and because sampling is a function of (seed, position) alone, the client cannot tell.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from opentelemetry import trace

from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, UnavailableError
from paceline.services.common.tasks import InUse
from paceline.services.gateway.admission_queue import AdmissionQueue
from paceline.services.gateway.attempt import Attempt, Ended, Event, HandedOver, NotCachedError
from paceline.services.gateway.errors import NoWorkerError
from paceline.services.gateway.fleet import Fleet
from paceline.services.gateway.placements import PlacementLog
from paceline.services.gateway.prefix_index import PrefixIndex
from paceline.services.gateway.router import Candidate, Need, Placement, place, place_in_turn
from paceline.services.gateway.sequence import SequenceRun
from paceline.services.gateway.traces import AttemptTrace
from paceline.services.gateway.worker_call import WorkerBusyError, WorkerFailedError

log = logging.getLogger(__name__)


class SequenceRunner:
    """Runs requests on a fleet."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, placements: PlacementLog, prefixes: PrefixIndex) -> None:
        self.queue = AdmissionQueue(config.max_waiting, config.queue_seconds)
        self._config = config
        self._fleet = fleet
        self._placements = placements
        self._prefixes = prefixes
        self._turns = itertools.count()
        self._running: set[Attempt] = set()
        self._aborted = False
        self.sequences = InUse()
        """Sequences that wait or run."""

    def abort(self) -> None:
        """Ends all attempts; each request fails with UnavailableError."""
        self._aborted = True
        for attempt in list(self._running):
            attempt.close()
        self.queue.wake()

    async def run(self, sequence: SequenceRun, take: Callable[[Event], object]) -> None:
        """Tells `take` what comes, and Ended last. What it raises ends the request.

        Raises:
            InvalidRequestError: no worker can ever serve this.
            BusyError: there was no room in time.
            UnavailableError: no worker, all attempts failed, or the longest life of a request is over.
        """
        deadline = sequence.trace.arrived + self._config.request_seconds
        with self.sequences.running():
            while True:
                attempt = await self._admit(sequence, deadline)
                try:
                    await attempt.run(partial(self._hear, sequence, attempt.record, take))
                    return
                except (WorkerFailedError, WorkerBusyError) as error:  # busy after it had admitted is a failure, too
                    attempt.record.fail(str(error))
                    if isinstance(error, WorkerBusyError):
                        error = WorkerFailedError(str(error), error.worker, unreachable=False)
                    self._note_failure(error, sequence)
                finally:
                    self._discard(attempt)
                    self.queue.wake()
                if finish := sequence.end():
                    take(Ended(finish))
                    return
                self._check_can_go_on(sequence, deadline)

    def _hear(self, sequence: SequenceRun, record: AttemptTrace, take: Callable[[Event], object], event: Event) -> None:
        if (fresh := sequence.note(event, record)) is not None:
            take(fresh)
        if isinstance(event, HandedOver):
            self.queue.wake()

    async def _admit(self, sequence: SequenceRun, deadline: float) -> Attempt:
        """A reserved place, after waiting where there is none."""
        span = trace.get_current_span()
        span.add_event("queue")
        record = sequence.trace
        again = record.attempts > 0
        own = AttemptTrace(ahead=len(self.queue))
        record.tries.append(own)
        try:
            attempt = await self.queue.admit(
                lambda: self._try_to_admit(sequence, own, deadline, again),
                priority=sequence.priority,
                first=again,
                patient=sequence.follows and not again,
            )
        except BusyError as error:
            if sequence.unreachable_since is None and self._fleet.max_model_len() >= sequence.context_tokens:
                raise
            raise sequence.unreachable() from error
        span.add_event("admitted", {"decode": attempt.decode.member.worker_id, "attempt": sequence.attempts})
        sequence.unreachable_since = None
        own.admitted = time.monotonic()
        self._placements.put(sequence.request_id, *record.workers, record.attempts)
        return attempt

    async def _try_to_admit(
        self, sequence: SequenceRun, record: AttemptTrace, deadline: float, again: bool
    ) -> Attempt | None:
        """Asks the workers in the router's order, until one admits; None where all are full or none is there now."""
        context_tokens = sequence.context_tokens
        cached = self._cached_tokens(sequence)
        refused: frozenset[str] = frozenset()
        busy = False
        while True:
            self._check_can_go_on(sequence, deadline)
            snapshot = self._fleet.snapshot()
            need = Need(
                context_tokens,
                prompt_tokens=len(sequence.context.token_ids),
                cached=cached,
                layouts=self._prefixes.layouts(),
                refused=refused,
                failed=sequence.failed,
                cut=self._fleet.failed_links(),
                local_tokens=0 if sequence.needs_scores else self._config.local_prefill_tokens,
            )
            placement = self._place(need, snapshot)
            if placement is None:
                if not again and self._fleet.max_model_len() < context_tokens:
                    raise NoWorkerError
                busy |= any(c.member.role == "prefill" and not c.has_room for c in snapshot)
                sequence.unreachable_since = None if busy else sequence.unreachable_since or time.monotonic()
                record.wait_for("no worker has room" if busy else "no worker that can be reached fits")
                return None
            attempt = Attempt(
                self._fleet,
                self._fleet.worker(placement.decode.worker_id),
                self._fleet.worker(placement.prefill.worker_id) if placement.prefill is not None else None,
                sequence.work(self._fleet.model),
                seconds=max(deadline - time.monotonic(), 0.1),
                stall_seconds=self._config.stall_seconds,
                record=record,
                source=self._fleet.host(placement.source),
                cached_tokens=placement.cached_tokens,
                least_cached_tokens=placement.least_cached_tokens,
            )
            self._running.add(attempt)
            try:
                await attempt.admit()
                return attempt
            except NotCachedError as error:
                self._discard(attempt)
                cached = {**cached, error.worker.member.host_id: error.cached_tokens}
            except WorkerBusyError as error:
                self._discard(attempt)
                record.wait_for(str(error))
                busy = True
                refused |= {error.worker.member.worker_id}
            except WorkerFailedError as error:
                self._discard(attempt)
                record.wait_for(str(error))
                # Nothing was begun: a worker that restarts or drains costs no attempt, however often that happens.
                self._note_failure(error, sequence, begun=not error.unreachable)
                refused |= {error.worker.member.worker_id}
            except BaseException:
                self._discard(attempt)
                raise

    def _cached_tokens(self, sequence: SequenceRun) -> Mapping[str, int]:
        """By host, how many tokens of the context it has, as far as this gateway knows."""
        if self._config.router_mode != "kv" or sequence.needs_scores:
            return {}
        return self._prefixes.cached_tokens(sequence.context, len(sequence.context.token_ids) - 1)

    def _place(self, need: Need, snapshot: Sequence[Candidate]) -> Placement | None:
        if self._config.router_mode == "round-robin":
            return place_in_turn(need, snapshot, next(self._turns))
        return place(need, snapshot)

    def _discard(self, attempt: Attempt) -> None:
        self._running.discard(attempt)
        attempt.close()

    def _note_failure(self, error: WorkerFailedError, sequence: SequenceRun, begun: bool = True) -> None:
        if error.link is not None:
            # Nobody's fault, and no try that counts: without the link there is another way, at the latest without any.
            self._fleet.avoid_link(error.link)
        else:
            sequence.failed |= {error.worker.member.worker_id}
            # Beyond its first token an attempt has got on: whatever ended it is not this request.
            sequence.failures = begun + (
                0 if len(sequence.generated) > sequence.generated_before + 1 else sequence.failures
            )
        sequence.last_failure = error
        if self._aborted:
            return
        log.warning("attempt %d failed after %d tokens: %s", sequence.attempts, len(sequence.generated), error)
        if error.unreachable:
            self._fleet.set_aside(error.worker)

    def _check_can_go_on(self, sequence: SequenceRun, deadline: float) -> None:
        reason, since, now = sequence.last_failure, sequence.unreachable_since, time.monotonic()
        if self._aborted:
            raise UnavailableError("this gateway is shutting down; try another one")
        if now >= deadline:
            raise UnavailableError(f"the request took longer than {self._config.request_seconds:g} seconds") from reason
        if sequence.failures >= self._config.max_attempts:
            raise UnavailableError(f"all {sequence.failures} attempts failed; the last one: {reason}") from reason
        if since is not None and now >= since + self._config.queue_seconds:
            raise sequence.unreachable() from reason
