"""The life of one sequence: it waits, an attempt runs, and the next attempt goes on if a worker fails or drains.

The gateway owns the sequence. A worker may end at any moment; then a new attempt starts from the tokens that have come
already. Sampling is a function of (seed, position) alone, so the client sees no difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from opentelemetry import trace

from paceline.core.cache_policy.hints import Hint
from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError
from paceline.core.numerics import may_differ
from paceline.core.request_classes import NO_CLASSES, Classes
from paceline.services.common.tasks import InUse
from paceline.services.gateway.admission_queue import AdmissionQueue
from paceline.services.gateway.attempt import Ended, Event, HandedOver, NotCachedError
from paceline.services.gateway.candidates import Candidate, Need, Placement
from paceline.services.gateway.encode_calls import AttemptMedia, EncodeRefusedError
from paceline.services.gateway.encoding_index import EncodingIndex
from paceline.services.gateway.errors import LeavingError, NoWorkerError
from paceline.services.gateway.first_worker import FirstWorker
from paceline.services.gateway.fleet import Fleet
from paceline.services.gateway.hint_sender import HintSender
from paceline.services.gateway.homes import Homes
from paceline.services.gateway.kinds import KINDS, AnyAttempt, KindOfWork
from paceline.services.gateway.load_control import FULL, PREMATURE, LoadControl
from paceline.services.gateway.patience import Patience
from paceline.services.gateway.placements import PlacementLog
from paceline.services.gateway.prefix_index import PrefixIndex
from paceline.services.gateway.queueing.shedding import RefusedError
from paceline.services.gateway.sequence import SequenceRun
from paceline.services.gateway.traces import AttemptTrace
from paceline.services.gateway.traffic import TrafficBook
from paceline.services.gateway.worker_call import WorkerBusyError, WorkerDrainingError, WorkerFailedError

REFUSED_SECONDS = (0.1, 0.4)
"""The shortest and longest time before the next attempt if no worker had room for an encoding, in seconds."""

log = logging.getLogger(__name__)


class SequenceRunner:
    """A runner of sequences on a fleet."""

    def __init__(
        self,
        config: GatewayConfig,
        fleet: Fleet,
        placements: PlacementLog,
        prefixes: PrefixIndex,
        classes: Classes = NO_CLASSES,
    ) -> None:
        self.queue = AdmissionQueue(config.max_waiting, config.queue_seconds)
        self._load = LoadControl(self.queue.shedder, fleet, config.queue_seconds, classes)
        self._config = config
        self._fleet = fleet
        self._placements = placements
        self._prefixes = prefixes
        self._encodings = EncodingIndex(prefixes)
        self._homes = Homes()
        self.hints = HintSender(fleet.host)
        self.traffic = TrafficBook()
        self.first_worker = FirstWorker(fleet, config.max_waiting)
        self._turns = itertools.count()
        self._running: dict[AnyAttempt, SequenceRun] = {}
        self._patience = Patience(config, fleet)
        self._aborted = False
        self.on_placed: Callable[[float], object] = lambda seconds: None
        """Called after a placement with the CPU time of the search for it, in seconds."""
        self.sequences = InUse()
        """Sequences that wait or run."""
        self._background = 0
        """Those of them that nobody waits for."""
        fleet.on_refresh = self._follow_fleet

    @property
    def client_sequences(self) -> int:
        """Number of sequences of clients that wait or run."""
        return self.sequences.count - self._background

    def abort(self) -> None:
        """End all attempts. Each sequence fails with UnavailableError."""
        self._aborted = True
        self.first_worker.abort()
        for attempt in list(self._running):
            attempt.close()
        self.queue.wake()

    async def run(self, sequence: SequenceRun, take: Callable[[Event], object]) -> None:
        """Run a sequence and give its events to `take`, Ended last. An exception of `take` ends the sequence.

        Raises:
            InvalidRequestError: no worker can ever serve this.
            BusyError: there was no room in time.
            UnavailableError: no worker, the request was given up for its own failures, or its longest life is over.
        """
        with self.sequences.running(), self._counted(sequence), self.traffic.counted(sequence):
            while True:
                attempt = await self._admit(sequence)
                refusal: EncodeRefusedError | None = None
                try:
                    await attempt.run(partial(self._hear, sequence, attempt, take))
                    self._load.end(sequence)
                    return
                except WorkerDrainingError as error:
                    attempt.record.fail(str(error))
                    sequence.failed |= {error.worker.member.worker_id}
                except EncodeRefusedError as error:
                    attempt.record.fail(str(error))
                    refusal = error
                except (WorkerFailedError, WorkerBusyError) as error:
                    attempt.record.fail(str(error))
                    if isinstance(error, WorkerBusyError):
                        # A worker that admitted the attempt and then reports busy has failed.
                        error = WorkerFailedError(str(error), error.worker, unreachable=False)
                    self._note_failure(error, sequence, attempt.record)
                finally:
                    self._discard(attempt)
                    self.queue.wake()
                if finish := sequence.end():
                    take(Ended(finish))
                    return
                if refusal is not None:
                    await self._wait_for_encoder(sequence, refusal)
                self._check_can_go_on(sequence)

    @contextlib.contextmanager
    def _counted(self, sequence: SequenceRun) -> Iterator[None]:
        self._background += sequence.background
        try:
            yield
        finally:
            self._background -= sequence.background

    async def _wait_for_encoder(self, sequence: SequenceRun, refusal: EncodeRefusedError) -> None:
        """Wait before the next attempt, which is not counted. Raises BusyError if workers have refused for too long."""
        now = time.monotonic()
        sequence.refused_since = sequence.refused_since or now
        if now >= sequence.refused_since + self._config.queue_seconds:
            message = (
                f"the server is busy: no worker had room for an image, a video or an audio clip within "
                f"{self._config.queue_seconds:g} seconds; try again later"
            )
            raise self._counted_refusal(sequence, RefusedError(message, "timeout")) from refusal
        await asyncio.sleep(random.uniform(*REFUSED_SECONDS))

    def _counted_refusal(self, sequence: SequenceRun, refusal: RefusedError) -> RefusedError:
        self.queue.on_refused(sequence.request_class, refusal.reason)
        return refusal

    def expect(self, sequence: SequenceRun, hints: Sequence[Hint]) -> None:
        """Tell the hosts on which a sequence has run about the next use of its context."""
        if hints:
            self.hints.put(self._fleet.layouts_of(sequence.trace.workers), sequence.context, hints)

    def _hear(self, sequence: SequenceRun, attempt: AnyAttempt, take: Callable[[Event], object], event: Event) -> None:
        self._patience.hear(event)
        fresh = sequence.note(event, attempt.record)
        self._load.hear(sequence, attempt.decode, attempt.record, event)
        if fresh is not None:
            take(fresh)
        if isinstance(event, HandedOver):
            self.queue.wake()

    def _follow_fleet(self) -> None:
        self._load.control.keep(self._fleet.worker_ids())
        self._leave_draining_workers()

    def _leave_draining_workers(self) -> None:
        """Move sequences from draining decode workers to others, as many as these have room for.

        A sequence stays if only workers with other numerics have room, because its tokens might change there.
        """
        staying = [(a, a.decode) for a in self._running if a.decode is not None and a.decode.member.state == "draining"]
        if not staying:
            return
        snapshot = self._fleet.snapshot()
        room = sum(
            max(0, candidate.member.max_seqs - candidate.in_flight)
            for candidate in snapshot
            if candidate.member.role == "decode" and candidate.member.state == "ready"
        )
        for attempt, worker in staying[:room]:
            sequence = self._running[attempt]
            numerics = worker.member.numerics
            need = Need(sequence.context_tokens, len(sequence.context.token_ids), decoded_with=numerics)
            place = KINDS[sequence.kind].place(need, snapshot)
            if place is not None and place.decode is not None and not may_differ(numerics, place.decode.numerics):
                attempt.leave()

    async def _admit(self, sequence: SequenceRun) -> AnyAttempt:
        """Return an attempt that workers have admitted. Waits in the queue if there is no room."""
        span = trace.get_current_span()
        span.add_event("queue")
        record = sequence.trace
        again = record.attempts > 0
        own = AttemptTrace(ahead=len(self.queue), computed_with=record.computed_with, decoded_with=record.decoded_with)
        record.tries.append(own)
        deadline = self._patience.begin_attempt(sequence)
        try:
            await self.first_worker.wait(max(deadline - time.monotonic(), 0.1))
        except RefusedError as refusal:
            raise self._counted_refusal(sequence, refusal) from None
        since = time.monotonic()
        claim = self._load.claim(sequence, lambda: self._cached_tokens(sequence), deadline)
        try:
            # The queue refuses an ordinary request before its deadline comes.
            async with asyncio.timeout(None if claim.is_ordinary else deadline - time.monotonic()):
                attempt: AnyAttempt = await self.queue.admit(
                    lambda: self._try_to_admit(sequence, own, deadline, again, time.monotonic() - since), claim
                )
        except TimeoutError:
            raise self._patience.too_late(sequence) from None
        except BusyError as error:
            if sequence.unreachable_since is None and self._max_model_len(sequence) >= sequence.context_tokens:
                raise
            raise sequence.unreachable() from error
        prefill, decode = own.worker_ids
        span.add_event("admitted", {"prefill": prefill, "decode": decode, "attempt": sequence.attempts})
        if changes := own.numerics_changes:
            span.add_event("numerics changed", changes)
            told = "; ".join(f"{step}: {change}" for step, change in changes.items())
            log.info("attempt %d goes on with other numerics: %s", sequence.attempts, told)
        sequence.unreachable_since = None
        own.admitted = time.monotonic()
        self._placements.put(sequence.request_id, *record.workers, record.attempts)
        return attempt

    async def _try_to_admit(
        self, sequence: SequenceRun, record: AttemptTrace, deadline: float, again: bool, waited: float
    ) -> AnyAttempt | None:
        """Ask workers in the router's order until they admit an attempt. Returns None if all are full or gone.

        Args:
            again: whether the sequence had been admitted before.
            waited: seconds since it began to wait in the queue.
        """
        kind = KINDS[sequence.kind]
        context_tokens = sequence.context_tokens
        begun = time.thread_time()
        cached = self._cached_tokens(sequence)
        refused: frozenset[str] = frozenset()
        full = frozenset() if again else self._load.control.full_workers()
        busy = False
        while True:
            self._check_can_go_on(sequence)
            snapshot = self._fleet.snapshot()
            need = Need(
                context_tokens,
                prompt_tokens=len(sequence.context.token_ids),
                cached=cached,
                layouts=self._prefixes.layouts(),
                refused=refused | full,
                failed=sequence.failed,
                computed_with=record.computed_with,
                decoded_with=record.decoded_with,
                cut=self._fleet.failed_links(),
                home=self._homes.get(sequence.owner, sequence.cache_key),
                local_tokens=0 if sequence.needs_scores or sequence.media else self._config.local_prefill_tokens,
            )
            placement = self._place(kind, need, snapshot)
            self.on_placed(time.thread_time() - begun)
            held = FULL if full and placement is None else ""
            may_wait = not again and not sequence.background  # the background has a pace of its own
            if (
                placement is not None
                and may_wait
                and self._load.control.is_premature(need, placement, snapshot, waited)
            ):
                placement, held = None, PREMATURE
            if placement is None:
                if not again and self._max_model_len(sequence) < context_tokens:
                    raise NoWorkerError
                busy |= bool(held) or any(c.member.role == "prefill" and not c.has_room for c in snapshot)
                sequence.unreachable_since = None if busy else sequence.unreachable_since or time.monotonic()
                record.wait_for(held or "no worker has room" if busy else "no worker that can be reached fits")
                return None
            attempt = kind.attempt(
                self._fleet,
                placement,
                sequence.work(self._fleet.model),
                seconds=max(deadline - time.monotonic(), 0.1),
                stall_seconds=self._config.stall_seconds,
                record=record,
                media=self._media(sequence),
            )
            self._running[attempt] = sequence
            try:
                await attempt.admit()
                self._homes.put(sequence.owner, sequence.cache_key, placement.computing.host_id)
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
                # An unreachable worker has begun nothing. However often it restarts or drains, no attempt is counted.
                self._note_failure(error, sequence, record, begun=not error.unreachable)
                refused |= {error.worker.member.worker_id}
            except BaseException:
                self._discard(attempt)
                raise
            begun = time.thread_time()

    def _media(self, sequence: SequenceRun) -> AttemptMedia | None:
        if not sequence.media:
            return None
        inputs = {span.digest: own for span, own in zip(sequence.media, sequence.media_inputs, strict=True)}
        return AttemptMedia(inputs, self._encodings, sequence.failed)

    def _max_model_len(self, sequence: SequenceRun) -> int:
        return self._fleet.max_model_len(KINDS[sequence.kind].decodes)

    def _cached_tokens(self, sequence: SequenceRun) -> Mapping[str, int]:
        """Return for each host id how many tokens of the context are cached there, as far as this gateway knows."""
        if self._config.router_mode != "kv" or sequence.needs_scores:
            return {}
        return self._prefixes.cached_tokens(sequence.context, len(sequence.context.token_ids) - 1)

    def _place(self, kind: KindOfWork, need: Need, snapshot: Iterable[Candidate]) -> Placement | None:
        if self._config.router_mode == "round-robin":
            return kind.place_in_turn(need, snapshot, next(self._turns))
        return kind.place(need, snapshot)

    def _discard(self, attempt: AnyAttempt) -> None:
        self._running.pop(attempt, None)
        attempt.close()

    def _note_failure(
        self, error: WorkerFailedError, sequence: SequenceRun, record: AttemptTrace, begun: bool = True
    ) -> None:
        self._patience.note(error, sequence, record, begun=begun, alone=self.sequences.count == 1)
        if not self._aborted:
            log.warning("attempt %d failed %s: %s", sequence.attempts, sequence.place(), error)

    def _check_can_go_on(self, sequence: SequenceRun) -> None:
        if self._aborted:
            raise LeavingError
        self._patience.check(sequence)
