"""The life of one request: waiting, attempts, and going on where a worker failed.

The gateway owns the request. A worker may die at any moment; then a new attempt starts from the tokens that have
already come, and because sampling is a function of (seed, position) alone, the client cannot tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from opentelemetry import trace

from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, UnavailableError
from paceline.services.gateway.attempt import Attempt, Ended, Event, HandedOver, NotCachedError
from paceline.services.gateway.errors import NoWorkerError
from paceline.services.gateway.fleet import Fleet
from paceline.services.gateway.placements import PlacementLog
from paceline.services.gateway.prefix_index import PrefixIndex
from paceline.services.gateway.progress import GenerateRequest, Progress
from paceline.services.gateway.record import AttemptRecord, RequestRecord
from paceline.services.gateway.router import Candidate, Need, Placement, place, place_in_turn
from paceline.services.gateway.waiting import WaitingLine
from paceline.services.gateway.worker_call import WorkerBusyError, WorkerFailedError

log = logging.getLogger(__name__)


class RequestRunner:
    """Runs requests on a fleet."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, placements: PlacementLog, prefixes: PrefixIndex) -> None:
        self.line = WaitingLine(config.max_waiting, config.queue_seconds)
        self._config = config
        self._fleet = fleet
        self._placements = placements
        self._prefixes = prefixes
        self._turns = itertools.count()
        self._running: set[Attempt] = set()
        self._aborted = False
        self.active = 0
        """Requests that wait or run."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()

    def abort(self) -> None:
        """Ends all attempts; each request fails with UnavailableError."""
        self._aborted = True
        for attempt in list(self._running):
            attempt.close()
        self.line.wake()

    async def run(self, request: GenerateRequest, record: RequestRecord, take: Callable[[Event], object]) -> None:
        """Tells `take` what comes, and Ended last. What it raises ends the request.

        Raises:
            InvalidRequestError: no worker can ever serve this.
            BusyError: there was no room in time.
            UnavailableError: no worker, all attempts failed, or the longest life of a request is over.
        """
        progress = Progress(request)
        deadline = record.arrived + self._config.request_seconds
        with self._counted():
            while True:
                attempt = await self._admit(progress, record, deadline)
                try:
                    await attempt.run(partial(self._hear, progress, attempt.record, take))
                    return
                except (WorkerFailedError, WorkerBusyError) as error:  # busy after it had admitted is a failure, too
                    attempt.record.fail(str(error))
                    if isinstance(error, WorkerBusyError):
                        error = WorkerFailedError(str(error), error.worker, unreachable=False)
                    self._note_failure(error, progress)
                finally:
                    self._discard(attempt)
                    self.line.wake()
                if finish := progress.end():
                    take(Ended(finish))
                    return
                self._check_can_go_on(progress, deadline)

    def _hear(self, progress: Progress, record: AttemptRecord, take: Callable[[Event], object], event: Event) -> None:
        if (fresh := progress.note(event, record)) is not None:
            take(fresh)
        if isinstance(event, HandedOver):
            self.line.wake()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.active += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if self.active == 0:
                self.idle.set()

    async def _admit(self, progress: Progress, record: RequestRecord, deadline: float) -> Attempt:
        """A reserved place, after waiting where there is none."""
        span = trace.get_current_span()
        span.add_event("queue")
        again = record.attempts > 0
        own = AttemptRecord(ahead=len(self.line))
        record.tries.append(own)
        try:
            attempt = await self.line.admit(
                lambda: self._try_to_admit(progress, own, deadline, again),
                priority=progress.request.priority,
                first=again,
                patient=progress.request.follows and not again,
            )
        except BusyError as error:
            if progress.unreachable_since is None and self._fleet.max_model_len() >= progress.request.context_tokens:
                raise
            raise progress.unreachable() from error
        span.add_event("admitted", {"decode": attempt.decode.member.worker_id, "attempt": progress.tries})
        progress.unreachable_since = None
        own.admitted = time.monotonic()
        self._placements.put(progress.request.request_id, *record.workers, record.attempts)
        return attempt

    async def _try_to_admit(
        self, progress: Progress, record: AttemptRecord, deadline: float, again: bool
    ) -> Attempt | None:
        """Asks the workers in the router's order, until one admits; None where all are full or none is there now."""
        context_tokens = progress.request.context_tokens
        cached = self._cached_tokens(progress)
        refused: frozenset[str] = frozenset()
        busy = False
        while True:
            self._check_can_go_on(progress, deadline)
            snapshot = self._fleet.snapshot()
            need = Need(
                context_tokens,
                prompt_tokens=len(progress.context.token_ids),
                cached=cached,
                layouts=self._prefixes.layouts(),
                refused=refused,
                failed=progress.failed,
                cut=self._fleet.links.cut(),
                local_tokens=0 if progress.needs_scores else self._config.local_prefill_tokens,
            )
            placement = self._place(need, snapshot)
            if placement is None:
                if not again and self._fleet.max_model_len() < context_tokens:
                    raise NoWorkerError
                busy |= any(c.member.role == "prefill" and not c.has_room for c in snapshot)
                progress.unreachable_since = None if busy else progress.unreachable_since or time.monotonic()
                record.wait_for("no worker has room" if busy else "no worker that can be reached fits")
                return None
            attempt = Attempt(
                self._fleet,
                self._fleet.worker(placement.decode.worker_id),
                self._fleet.worker(placement.prefill.worker_id) if placement.prefill is not None else None,
                progress.work(self._fleet.model),
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
                self._note_failure(error, progress, begun=not error.unreachable)
                refused |= {error.worker.member.worker_id}
            except BaseException:
                self._discard(attempt)
                raise

    def _cached_tokens(self, progress: Progress) -> Mapping[str, int]:
        """By host, how many tokens of the context it has, as far as this gateway knows."""
        if self._config.router_mode != "kv" or progress.needs_scores:
            return {}
        return self._prefixes.cached_tokens(progress.context, len(progress.context.token_ids) - 1)

    def _place(self, need: Need, snapshot: Sequence[Candidate]) -> Placement | None:
        if self._config.router_mode == "round-robin":
            return place_in_turn(need, snapshot, next(self._turns))
        return place(need, snapshot)

    def _discard(self, attempt: Attempt) -> None:
        self._running.discard(attempt)
        attempt.close()

    def _note_failure(self, error: WorkerFailedError, progress: Progress, begun: bool = True) -> None:
        if error.link is not None:
            # Nobody's fault, and no try that counts: without the link there is another way, at the latest without any.
            self._fleet.links.avoid(error.link)
        else:
            progress.failed |= {error.worker.member.worker_id}
            # Beyond its first token an attempt has got on: whatever ended it is not this request.
            progress.failures = begun + (0 if len(progress.generated) > progress.known + 1 else progress.failures)
        progress.last_failure = error
        if self._aborted:
            return
        log.warning("attempt %d failed after %d tokens: %s", progress.tries, len(progress.generated), error)
        if error.unreachable:
            error.worker.set_aside()

    def _check_can_go_on(self, progress: Progress, deadline: float) -> None:
        reason, since, now = progress.last_failure, progress.unreachable_since, time.monotonic()
        if self._aborted:
            raise UnavailableError("this gateway is shutting down; try another one")
        if now >= deadline:
            raise UnavailableError(f"the request took longer than {self._config.request_seconds:g} seconds") from reason
        if progress.failures >= self._config.max_attempts:
            raise UnavailableError(f"all {progress.failures} attempts failed; the last one: {reason}") from reason
        if since is not None and now >= since + self._config.queue_seconds:
            raise progress.unreachable() from reason
