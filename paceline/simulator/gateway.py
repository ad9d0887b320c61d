"""The gateway of a simulation: the real router, queue, admission control and counts of calls, with requests that only
take time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from paceline.core.errors import InvalidRequestError
from paceline.core.prefix import BlockHolders
from paceline.core.request_classes import BACKGROUND, DEFAULT, NO_CLASSES, Classes
from paceline.core.step_times import Profile
from paceline.services.gateway.http.errors import NoRoomError
from paceline.services.gateway.queueing.admission_control import AdmissionControl
from paceline.services.gateway.queueing.fair_order import Demand, QueueClaim
from paceline.services.gateway.queueing.queue_state import HELD, Held
from paceline.services.gateway.routing.candidates import Candidate, Need
from paceline.services.gateway.routing.router import place
from paceline.services.kvtransfer.ledger.lease_book import GRACE_SECONDS
from paceline.simulator.attempts import Attempts
from paceline.simulator.events import Events
from paceline.simulator.known_workers import KnownWorkers
from paceline.simulator.recorder import SimulationRecorder
from paceline.simulator.sequence import Sequence
from paceline.simulator.steps import Run
from paceline.simulator.trace import TraceRequest
from paceline.simulator.waiting_queue import WaitingQueue
from paceline.simulator.worker import SimulatedWorker

MOST_REFUSALS = 16
"""Number of workers that refuse a request in a row before the request waits. A real gateway would ask all other workers
first. In a full fleet, asking them changes nothing, but takes time.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The options of `paceline gateway` that affect a simulation, and the number of retries by clients."""

    queue_seconds: float = 60.0
    max_waiting: int = 256
    request_seconds: float = 1800.0
    local_prefill_tokens: int = 32
    classes: Classes = dataclasses.field(default_factory=lambda: NO_CLASSES)
    retries: int = 0
    """Largest number of times that a client sends a refused request again, each at the time that the refusal names."""


class SimulatedGateway:
    """Places requests on workers, and refuses requests that would wait too long.

    Args:
        seed: seed of all random delays.
        on_over: called when a request has ended or was refused.
        on_steps: called after steps of a worker.
    """

    def __init__(
        self,
        events: Events,
        profile: Profile,
        block_tokens: int,
        hints: BlockHolders,
        recorder: SimulationRecorder,
        options: GatewayOptions,
        seed: int,
        *,
        on_over: Callable[[Sequence], object],
        on_steps: Callable[[SimulatedWorker, Run], object],
    ) -> None:
        self._on_over, self._on_steps = on_over, on_steps
        self.known = KnownWorkers(events, profile.max_model_len)
        self.attempts = Attempts(
            events,
            profile,
            block_tokens,
            self.known,
            hints,
            recorder,
            seed + 1,
            on_room=lambda: self.waiting.wake(),
            on_lost=self._enter,
            on_first_token=self._note_first_token,
            on_ended=self._ended,
            on_steps=self._note_steps,
        )
        self.waiting = WaitingQueue(
            events, options.max_waiting, options.queue_seconds, self._try, self._refused, seed + 2
        )
        self._control = AdmissionControl(self.waiting.shedder, self._find, options.queue_seconds, options.classes)
        self._has_itl_objectives = any(each.itl_seconds is not None for each in options.classes.values())
        self._events, self._profile, self._recorder = events, profile, recorder
        self._options = options
        self._block_tokens = block_tokens
        self._random = random.Random(seed)

    # ---- the fleet

    def join(self, worker: SimulatedWorker) -> None:
        """Begin to place requests on a worker that is ready."""
        self.known.join(worker)
        self.waiting.wake()

    def drain(self, worker: SimulatedWorker) -> None:
        """Give a worker nothing new, and move its decoding sequences to other workers that have room for them."""
        self.known.withdraw(worker)
        for sequence in list(worker.admitted):
            if worker.rows.has(sequence):
                self.attempts.move(sequence)

    def lose(self, worker: SimulatedWorker) -> None:
        """Place the requests of a worker that has ended on other workers."""
        self.known.withdraw(worker)
        for sequence in worker.stop():
            sequence.failed |= {worker.name}
            self.attempts.leave(sequence, GRACE_SECONDS)
            self._enter(sequence)
        self.known.forget(worker)

    def _find(self, worker_id: str) -> Candidate | None:
        calls = self.known.calls.get(worker_id)
        return None if calls is None else calls.candidate(0.0)

    # ---- arrival and placement

    def arrive(self, number: int, request: TraceRequest, names: list[bytes]) -> None:
        """Receive a request of a trace.

        Args:
            number: number of the request in the trace.
            names: names of the full blocks of its context, in order, as far as they are known.
        """
        sequence = Sequence(
            number,
            self._events.now,
            request.prompt_tokens,
            request.answer_tokens,
            request.group,
            names,
            owner=request.owner,
            priority=request.priority,
            adapter=request.adapter,
        )
        self._recorder.arrived(sequence)
        if sequence.prompt_tokens + sequence.answer_tokens > self._profile.max_model_len:
            self._end_refused(sequence, "too long")
        else:
            self._receive(sequence)

    def _receive(self, sequence: Sequence) -> None:
        """Receive a request that comes for the first time or comes back."""
        sequence.received = self._events.now
        level = self._random.random()
        self._events.after(self._profile.gateway.at(sequence.prompt_tokens, level), self._enter, sequence)

    def _enter(self, sequence: Sequence) -> None:
        """Place a request now, or put it into the queue until its turn comes."""
        sequence.context = sequence.prompt_tokens + sequence.done
        sequence.background = (sequence.group or DEFAULT) == BACKGROUND
        by = self._control.first_token_by(sequence.group or DEFAULT, sequence.received, None)
        sequence.wanted_seconds = None if by is None else max(0.0, by - self._events.now)
        sequence.waits_since = self._events.now
        self.waiting.admit(sequence, self._claim(sequence))

    def _claim(self, sequence: Sequence) -> QueueClaim:
        name = sequence.group or DEFAULT

        def measure() -> Demand:
            uncached = sequence.context - max(self._cached_tokens(sequence).values(), default=0)
            return self._control.demand(
                request_class=name,
                owner=sequence.owner,
                uncached=uncached,
                max_tokens=max(1, self._profile.max_model_len - sequence.context),
                arrived=sequence.received,
                deadline=sequence.received + self._options.request_seconds,
                fingerprint=sequence.number,
            )

        return QueueClaim(
            owner=sequence.owner,
            weight=self._control.class_of(name).weight,
            priority=sequence.priority,
            request_class=name,
            first=sequence.placed >= 0,
            background=name == BACKGROUND and sequence.placed < 0,
            measure=measure,
        )

    def _try(self, sequence: Sequence) -> bool | Held:
        """Place a request on workers that admit it. Return False if no worker does, and HELD if workers have enough
        prompts.
        """
        again = sequence.placed >= 0
        sequence.computed = 0
        cached = self._cached_tokens(sequence)
        refused: frozenset[str] = frozenset()
        full = frozenset() if again else self._control.full_workers()
        while len(refused) < MOST_REFUSALS:
            need = Need(
                sequence.prompt_tokens + sequence.answer_tokens,
                prompt_tokens=sequence.context,
                cached=cached,
                refused=refused | full,
                failed=sequence.failed,
                adapter=sequence.adapter,
                local_tokens=self._options.local_prefill_tokens,
            )
            snapshot = self.known.candidates()
            placement = place(need, snapshot)
            waited = self._events.now - sequence.waits_since
            may_wait = not again and sequence.group != BACKGROUND
            if placement is None:
                return False
            if may_wait and self._control.is_premature(need, placement, snapshot, waited):
                return HELD
            try:
                refusal = self.attempts.begin(sequence, placement)
            except InvalidRequestError:
                self._end_refused(sequence, "too long")
                return False
            if refusal is None:
                return True
            if isinstance(refusal, str):
                refused |= {refusal}
            else:
                cached[refusal[0]] = refusal[1]
        return False

    def _cached_tokens(self, sequence: Sequence) -> dict[str, int]:
        """Return the number of a context's tokens that each host has cached, to the gateway's knowledge."""
        return self.attempts.cached_tokens(sequence, (sequence.context - 1) // self._block_tokens)

    # ---- the end

    def _refused(self, sequence: Sequence, refusal: NoRoomError) -> None:
        """Let the client of a refused request send it again at the time that the refusal names, or end the request."""
        if sequence.retries < self._options.retries:
            sequence.retries += 1
            self._events.after(refusal.seconds, self._receive, sequence)
        else:
            self._end_refused(sequence, refusal.reason)

    def _end_refused(self, sequence: Sequence, reason: str) -> None:
        sequence.is_over = True
        self._recorder.refused(sequence, reason)
        self._on_over(sequence)

    def _ended(self, sequence: Sequence) -> None:
        self._control.note_answer(sequence.owner, sequence.answer_tokens)
        self._on_over(sequence)

    # ---- what is measured

    def _note_first_token(self, sequence: Sequence) -> None:
        if sequence.starts == 1 and sequence.done == 1:
            uncached = sequence.prompt_tokens - sequence.first_cached
            self._control.note_first_token(self._events.now - sequence.placed, uncached, self._events.now)

    def _note_steps(self, worker: SimulatedWorker, run: Run) -> None:
        if self._has_itl_objectives and run.rows:
            self._note_gaps(worker, run)
        self._on_steps(worker, run)

    def _note_gaps(self, worker: SimulatedWorker, run: Run) -> None:
        """Measure the times between tokens of each class."""
        now, running = self._events.now, self.known.calls[worker.name].in_flight
        gaps = run.gaps().tolist()
        joined = [sequence.group for sequence in run.joined]
        for group, rows in run.by_group.items():
            # For sequences that join, the gap before their first tokens is the handoff.
            counts = [rows - joined.count(group), *[rows] * (run.steps - 1)]
            for seconds, count in zip(gaps, counts):
                self._control.note_gap(worker.name, running, seconds, group or DEFAULT, now, count)
