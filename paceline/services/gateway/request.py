"""The life of one request: waiting, attempts, and going on where a worker failed.

The gateway owns the request. A worker may die at any moment; then a new attempt starts from the tokens that have
already come, and because sampling is a function of (seed, position) alone, the client cannot tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import trace

from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, UnavailableError
from paceline.core.types import FinishReason, Key, SamplingParams
from paceline.proto import common_pb2
from paceline.services.common.wire import key_to_pb, sampling_to_pb
from paceline.services.gateway.attempt import (
    Attempt,
    Ended,
    Event,
    Generated,
    HandedOver,
    NotCachedError,
    PromptScores,
    WorkerBusyError,
    WorkerFailedError,
)
from paceline.services.gateway.errors import NoWorkerError
from paceline.services.gateway.fleet import Fleet
from paceline.services.gateway.placements import PlacementLog
from paceline.services.gateway.prefix_index import Context, PrefixIndex
from paceline.services.gateway.record import AttemptRecord, RequestRecord
from paceline.services.gateway.router import Candidate, Need, Placement, place, place_in_turn
from paceline.services.gateway.waiting import WaitingLine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate."""

    request_id: str
    """Unique among all requests that run in the cluster."""
    token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    follows: bool = False
    """Whether another sequence of the same client's request came before it: the client is being served already."""

    @property
    def context_tokens(self) -> int:
        return len(self.token_ids) + self.sampling.max_tokens


class _Progress:
    """What an attempt leaves to the next one."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.context = Context(request.token_ids, request.cache_salt)
        self.generated: list[int] = []
        self.tries = 0
        self.failures = 0
        """Attempts that failed in a row."""
        self.known = 0
        """Tokens that had come before this attempt."""
        self.last_failure: WorkerFailedError | None = None
        self.unreachable_since: float | None = None
        """On time.monotonic(); set while what keeps the request waiting is not that workers are full."""
        self.scored = 0
        """Prompt tokens whose logprobs have come."""
        self.failed: frozenset[str] = frozenset()

    @property
    def needs_scores(self) -> bool:
        """Whether all of the prompt has to be computed, for its logprobs."""
        asked = self.request.sampling.prompt_logprobs is not None
        return asked and self.scored < len(self.request.token_ids)

    def work(self, model: str) -> common_pb2.Work:
        """What the next try asks of workers."""
        self.tries += 1
        self.known = len(self.generated)
        request, sampling = self.request, self.request.sampling
        if not self.needs_scores:
            sampling = dataclasses.replace(sampling, prompt_logprobs=None)
        return common_pb2.Work(
            key=key_to_pb(Key(request.request_id, self.tries, 1)),
            model=model,
            token_ids=self.context.token_ids,
            prompt_tokens=len(request.token_ids),
            sampling=sampling_to_pb(sampling),
            cache_salt=request.cache_salt,
        )

    def end(self) -> FinishReason | None:
        """The end that a worker may have reached without having been able to say so."""
        sampling = self.request.sampling
        if self.generated and sampling.ends(self.generated[-1], len(self.generated)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.generated) >= sampling.max_tokens else None

    def unreachable(self) -> UnavailableError:
        """What to say when `unreachable_since` is too long ago."""
        return UnavailableError(f"{self.last_failure or 'no worker has come back in time'}; try again later")

    def note(self, event: Event, record: AttemptRecord) -> Event | None:
        """Remembers what came; returns what of it the client has not seen yet."""
        match event:
            case Generated(tokens):
                if not self.generated:
                    trace.get_current_span().add_event("first token")
                self.generated += [token.id for token in tokens]
                self.context.token_ids += [token.id for token in tokens]
                record.token_times.append(time.monotonic())
                record.tokens += len(tokens)
            case HandedOver():
                record.handed_over = time.monotonic()
                trace.get_current_span().add_event("handoff")
            case PromptScores():
                return self._new_scores(event)
        return event

    def _new_scores(self, scores: PromptScores) -> PromptScores | None:
        """The part that no earlier attempt has reported."""
        fresh = scores.tokens[max(0, self.scored - scores.first) :]
        if not fresh:
            return None
        first = scores.first + len(scores.tokens) - len(fresh)
        self.scored = first + len(fresh)
        return PromptScores(first, fresh)


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

    async def run(self, request: GenerateRequest, record: RequestRecord) -> AsyncGenerator[Event]:
        """Yields what comes, and Ended last. Must be closed when left early; then its calls are cancelled.

        Raises:
            InvalidRequestError: no worker can ever serve this.
            BusyError: there was no room in time.
            UnavailableError: no worker, all attempts failed, or the longest life of a request is over.
        """
        progress = _Progress(request)
        deadline = record.arrived + self._config.request_seconds
        with self._counted():
            while True:
                attempt = await self._admit(progress, record, deadline)
                try:
                    while True:
                        if (event := progress.note(await attempt.next(), attempt.record)) is not None:
                            yield event
                        if isinstance(event, HandedOver):
                            self.line.wake()
                        if isinstance(event, Ended):
                            await attempt.farewell()
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
                    yield Ended(finish)
                    return
                self._check_can_go_on(progress, deadline)

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

    async def _admit(self, progress: _Progress, record: RequestRecord, deadline: float) -> Attempt:
        """A reserved place, after waiting where there is none."""
        span = trace.get_current_span()
        span.add_event("queue")
        again = record.attempts > 0
        own = AttemptRecord(ahead=len(self.line))
        record.tries.append(own)
        try:
            attempt = await self.line.admit(
                lambda: self._try_to_admit(progress, own, deadline, again),
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
        self, progress: _Progress, record: AttemptRecord, deadline: float, again: bool
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
                refused=refused,
                failed=progress.failed,
                cut=self._fleet.links.cut(),
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

    def _cached_tokens(self, progress: _Progress) -> Mapping[str, int]:
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

    def _note_failure(self, error: WorkerFailedError, progress: _Progress, begun: bool = True) -> None:
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

    def _check_can_go_on(self, progress: _Progress, deadline: float) -> None:
        reason, since, now = progress.last_failure, progress.unreachable_since, time.monotonic()
        if self._aborted:
            raise UnavailableError("this gateway is shutting down; try another one")
        if now >= deadline:
            raise UnavailableError(f"the request took longer than {self._config.request_seconds:g} seconds") from reason
        if progress.failures >= self._config.max_attempts:
            raise UnavailableError(f"all {progress.failures} attempts failed; the last one: {reason}") from reason
        if since is not None and now >= since + self._config.queue_seconds:
            raise progress.unreachable() from reason
