"""The start of an attempt: the search for workers that admit the attempt; and the attempts that run now."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping

from paceline.core.adapters import short_digest
from paceline.core.config import GatewayConfig
from paceline.core.numerics import may_differ
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.http.errors import NoWorkerError
from paceline.services.gateway.queueing.admission_control import AdmissionControl
from paceline.services.gateway.queueing.queue_state import HELD, Held
from paceline.services.gateway.routing.candidates import Candidate, Need, Placement
from paceline.services.gateway.routing.encode_router import EncodingIndex
from paceline.services.gateway.routing.prefix_index import Homes, PrefixIndex
from paceline.services.gateway.sequences.attempt import AnyAttempt, NotCachedError
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.encode_calls import AttemptMedia
from paceline.services.gateway.sequences.kinds import KINDS
from paceline.services.gateway.sequences.load import FULL, PREMATURE
from paceline.services.gateway.sequences.patience import Patience
from paceline.services.gateway.sequences.progress import NobodyFound
from paceline.services.gateway.sequences.sequence import SequenceRun
from paceline.services.gateway.sequences.worker_call import WorkerBusyError, WorkerFailedError


class RunningAttempts:
    """All attempts that have been started and not discarded, each with its sequence."""

    def __init__(self) -> None:
        self._sequences: dict[AnyAttempt, SequenceRun] = {}

    def add(self, attempt: AnyAttempt, sequence: SequenceRun) -> None:
        """Keep an attempt that is about to ask its workers."""
        self._sequences[attempt] = sequence

    def discard(self, attempt: AnyAttempt) -> None:
        """End the calls of an attempt, and forget it."""
        self._sequences.pop(attempt, None)
        attempt.close()

    def close(self) -> None:
        """End the calls of all attempts. Each attempt then fails in the task that runs it, which also discards it."""
        for attempt in list(self._sequences):
            attempt.close()

    def leave_draining_workers(self, fleet: Fleet) -> None:
        """Move sequences from draining decode workers to other workers, as many as the other workers have room for.

        A sequence stays if only workers with other numerics or weights have room, because its tokens might change.
        """
        draining = [
            (attempt, sequence, worker.member)
            for attempt, sequence in self._sequences.items()
            if (worker := attempt.decode) is not None and worker.member.state == "draining"
        ]
        if not draining:
            return
        snapshot = fleet.snapshot()
        room = sum(
            max(0, candidate.member.max_seqs - candidate.in_flight)
            for candidate in snapshot
            if candidate.member.role == "decode" and candidate.member.state == "ready"
        )
        for attempt, sequence, member in draining[:room]:
            need = Need(
                sequence.prompt.context_tokens,
                len(sequence.context.token_ids),
                decoded_with=member.numerics,
                weights=member.weights,
            )
            place = KINDS[sequence.plan.kind].place(need, snapshot)
            decode = None if place is None else place.decode
            if decode is not None and not may_differ(member.numerics, decode.numerics):
                attempt.leave()


class AttemptStarter:
    """Starts attempts and asks workers to admit them, in the order in which the router prefers these workers.

    Args:
        prefixes: the cached blocks of all hosts.
        control: admission control: decides which workers get no more requests for now.
        patience: decides whether a sequence may go on, and records its failures.
        attempts: registry to which each attempt is added before its workers are asked.
        observe_search: called after each search for workers with its CPU time in seconds.
    """

    def __init__(
        self,
        config: GatewayConfig,
        fleet: Fleet,
        prefixes: PrefixIndex,
        control: AdmissionControl,
        patience: Patience,
        attempts: RunningAttempts,
        observe_search: Callable[[float], object],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._prefixes = prefixes
        self._control = control
        self._patience = patience
        self._attempts = attempts
        self._homes = Homes()
        self._turns = itertools.count()
        self.encodings = EncodingIndex(prefixes)
        self._observe_search = observe_search

    async def try_to_start(self, sequence: SequenceRun, deadline: float, waited: float) -> AnyAttempt | Held | None:
        """Return an attempt that workers have admitted; None if all workers are full or gone; HELD if a worker has
        room, but every such worker already has enough prompts in its own queue.

        The caller must have begun an attempt in the sequence's trace. If workers fail instead of admitting the attempt,
        this function begins the next attempt there.

        Args:
            deadline: instant at which the sequence is given up, on time.monotonic().
            waited: seconds since the sequence began to wait in the queue.

        Raises:
            InvalidRequestError: a worker can never serve the sequence.
            UnavailableError: no worker fits the sequence, the sequence is given up, or the gateway ends.
        """
        begun = time.thread_time()
        attempt_trace = sequence.trace.tries[-1]
        cached = self.cached_tokens(sequence)
        refused: frozenset[str] = frozenset()
        full = frozenset() if _was_admitted(sequence) else self._control.full_workers()
        is_busy = False
        while True:
            self._patience.check(sequence)
            snapshot = self._fleet.snapshot()
            need = self._need(sequence, attempt_trace, cached, refused | full)
            placement = self._place(sequence, need, snapshot)
            self._observe_search(time.thread_time() - begun)
            held = FULL if full and placement is None else ""
            if placement is not None and self._is_premature(sequence, need, placement, snapshot, waited):
                placement, held = None, PREMATURE
            if placement is None:
                known = list(snapshot)
                own = [candidate for candidate in known if need.may_go_on_with(candidate.member.weights)]
                is_busy |= bool(held) or any(c.member.role in ("pool", "prefill") and not c.has_room for c in own)
                self._note_wait(sequence, attempt_trace, held, is_busy, is_left_behind=bool(known) and not own)
                return HELD if held == PREMATURE else None
            attempt = self._new_attempt(sequence, placement, attempt_trace, deadline)
            try:
                await attempt.admit()
                self._homes.put(sequence.plan.owner, sequence.plan.cache_key, placement.computing.host_id)
                return attempt
            except NotCachedError as error:
                self._attempts.discard(attempt)
                attempt_trace.asked = None
                cached = {**cached, error.worker.member.host_id: error.cached_tokens}
            except WorkerBusyError as error:
                self._attempts.discard(attempt)
                attempt_trace.wait_for(str(error))
                is_busy = True
                refused |= {error.worker.member.worker_id}
            except WorkerFailedError as error:
                self._attempts.discard(attempt)
                attempt_trace.end("failed", str(error))
                # An unreachable worker has begun nothing. However often it restarts or drains, this does not count
                # against the sequence.
                self._patience.note(error, sequence, attempt_trace, begun=not error.unreachable)
                attempt_trace = sequence.trace.begin_attempt(attempt_trace.ahead)
                refused |= {error.worker.member.worker_id}
            except BaseException:
                self._attempts.discard(attempt)
                raise
            begun = time.thread_time()

    def cached_tokens(self, sequence: SequenceRun) -> Mapping[str, int]:
        """Return how many tokens of the context each host has cached, as far as this gateway knows, by host id."""
        if self._config.router_mode != "kv" or sequence.needs_scores or sequence.prompt.pool is not None:
            return {}
        return self._prefixes.cached_tokens(sequence.context, len(sequence.context.token_ids) - 1)

    def note_prompt(self, sequence: SequenceRun) -> None:
        """Note for later searches that the last blocks of a prompt may be cached. Call this at its first token."""
        self._prefixes.note_end(sequence.context, sequence.plan.kept_tokens(sequence.prompt))

    def note_end(self, sequence: SequenceRun) -> None:
        """Note for later searches that the last blocks of a sequence may be cached. Call this when it has ended."""
        if sequence.prompt.pool is not None:
            return  # its context is many contexts
        # Nobody computes the KV of the last token.
        for length in (len(sequence.prompt.token_ids), len(sequence.context) - 1):
            self._prefixes.note_end(sequence.context, length)

    def fits(self, sequence: SequenceRun) -> bool:
        """Return whether a known worker's longest context is long enough for a sequence."""
        return self._fleet.max_model_len(KINDS[sequence.plan.kind].decodes) >= sequence.prompt.context_tokens

    def _need(
        self, sequence: SequenceRun, attempt_trace: AttemptTrace, cached: Mapping[str, int], refused: frozenset[str]
    ) -> Need:
        plan, prompt = sequence.plan, sequence.prompt
        return Need(
            prompt.context_tokens,
            prompt_tokens=len(sequence.context.token_ids),
            cached=cached,
            layouts=self._prefixes.layouts(),
            refused=refused,
            failed=sequence.progress.failed,
            computed_with=attempt_trace.computed_with,
            decoded_with=attempt_trace.decoded_with,
            weights=attempt_trace.weights,
            cut=self._fleet.failed_links(),
            home=self._homes.get(plan.owner, plan.cache_key),
            adapter=short_digest(plan.adapter_digest),
            local_tokens=0 if sequence.needs_scores or prompt.media else self._config.local_prefill_tokens,
        )

    def _place(self, sequence: SequenceRun, need: Need, snapshot: Iterable[Candidate]) -> Placement | None:
        kind = KINDS[sequence.plan.kind]
        if self._config.router_mode == "round-robin":
            return kind.place_in_turn(need, snapshot, next(self._turns))
        return kind.place(need, snapshot)

    def _is_premature(
        self, sequence: SequenceRun, need: Need, placement: Placement, snapshot: Iterable[Candidate], waited: float
    ) -> bool:
        if _was_admitted(sequence) or sequence.plan.background:  # the background has a pace of its own
            return False
        return self._control.is_premature(need, placement, snapshot, waited)

    def _note_wait(
        self, sequence: SequenceRun, attempt_trace: AttemptTrace, held: str, is_busy: bool, is_left_behind: bool
    ) -> None:
        """Record why there is no placement.

        Args:
            held: why the sequence is not sent to a worker that has room; "" if there is none.
            is_busy: whether a worker that fits the sequence exists and might have room later.
            is_left_behind: whether there are workers, but none with the weights that began the answer.

        Raises:
            NoWorkerError: no worker can ever serve the sequence.
        """
        if not _was_admitted(sequence) and not self.fits(sequence):
            raise NoWorkerError
        sequence.advance(NobodyFound(time.monotonic(), is_busy, is_left_behind))
        fits = "has the weights that began the answer" if is_left_behind else "that can be reached fits"
        attempt_trace.wait_for(held or "no worker has room" if is_busy else f"no worker {fits}")

    def _new_attempt(
        self, sequence: SequenceRun, placement: Placement, attempt_trace: AttemptTrace, deadline: float
    ) -> AnyAttempt:
        plan = sequence.plan
        by = self._control.first_token_by(plan.request_class, sequence.trace.arrived, plan.ttft_seconds)
        attempt = KINDS[plan.kind].attempt(
            self._fleet,
            placement,
            sequence.work(
                self._fleet.model,
                () if sequence.prompt.pool is not None else self._prefixes.ends(sequence.context),
                None if by is None else max(0.0, by - time.monotonic()),
            ),
            seconds=max(deadline - time.monotonic(), 0.1),
            stall_seconds=self._config.stall_seconds,
            attempt_trace=attempt_trace,
            media=self._media(sequence),
        )
        self._attempts.add(attempt, sequence)
        return attempt

    def _media(self, sequence: SequenceRun) -> AttemptMedia | None:
        if not (prompt := sequence.prompt).media:
            return None
        inputs = {span.digest: own for span, own in zip(prompt.media, prompt.inputs, strict=True)}
        return AttemptMedia(inputs, self.encodings, sequence.progress.failed)


def _was_admitted(sequence: SequenceRun) -> bool:
    return sequence.trace.admitted is not None
