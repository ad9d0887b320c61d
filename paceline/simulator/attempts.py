"""The attempts of requests on simulated workers: admission with blocks, prompt, handoff and end.

Attempts go through the same states as in docs/design.md. If an attempt's worker ends, the request continues on another
worker with the tokens that it has.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from paceline.core.errors import BusyError
from paceline.core.kv_layout import BASE_TOKENS
from paceline.core.prefix import BlockHolders
from paceline.core.step_times import Delay, Profile
from paceline.services.gateway.routing.candidates import Placement
from paceline.services.kvtransfer.ledger.lease import TRANSFER
from paceline.simulator.adapters import hold_all
from paceline.simulator.events import Events
from paceline.simulator.host import Host
from paceline.simulator.known_workers import KnownWorkers
from paceline.simulator.preemption import Preemption
from paceline.simulator.recorder import SimulationRecorder
from paceline.simulator.rows import SimulatedRow
from paceline.simulator.sequence import Sequence
from paceline.simulator.steps import Run
from paceline.simulator.worker import SimulatedWorker


class Workers(NamedTuple):
    """The workers of an attempt: one that decodes, and possibly another one that computes the prompt."""

    decode: SimulatedWorker
    prefill: SimulatedWorker | None
    """The worker that computes the prompt for the decode worker; None if the decode worker computes the prompt itself,
    or has taken the request over.
    """

    @property
    def computing(self) -> SimulatedWorker:
        """The worker that computes the prompt: the prefill worker if there is one, otherwise the decode worker."""
        return self.prefill or self.decode


Refusal = str | tuple[str, int]
"""Why an attempt cannot begin: the name of a worker without room, or the name of a host and the number of tokens that
this host really has cached.
"""


class Attempts:
    """Begins and ends attempts, and receives the results of the steps of all workers.

    Args:
        block_tokens: tokens of a block.
        seed: decides the delays of handoffs.
        on_room: called when a worker may have room for another request.
        on_lost: called with a request that has to continue on other workers.
        on_first_token: called with a request whose prompt is computed, so that its first token is known.
        on_ended: called with a request that has all of its tokens.
        on_steps: called after steps of a worker.
    """

    def __init__(
        self,
        events: Events,
        profile: Profile,
        block_tokens: int,
        known: KnownWorkers,
        hints: BlockHolders,
        recorder: SimulationRecorder,
        seed: int,
        *,
        on_room: Callable[[], object],
        on_lost: Callable[[Sequence], object],
        on_first_token: Callable[[Sequence], object],
        on_ended: Callable[[Sequence], object],
        on_steps: Callable[[SimulatedWorker, Run], object],
    ) -> None:
        self._on_room, self._on_lost, self._on_first_token = on_room, on_lost, on_first_token
        self._on_ended, self._on_steps = on_ended, on_steps
        self._events, self._profile, self._block_tokens = events, profile, block_tokens
        self._known, self._hints, self._recorder = known, hints, recorder
        self._random = random.Random(seed)
        self._workers: dict[Sequence, Workers] = {}
        self._preemption = Preemption(events, recorder, self.move)

    def cached_tokens(self, sequence: Sequence, blocks: int) -> dict[str, int]:
        """Return, for each host, the number of cached tokens of a context's first blocks. Hosts without any are left
        out.
        """
        found = self._hints.cached_tokens(sequence.block_names(blocks), blocks * BASE_TOKENS)
        unit, names = self._block_tokens // BASE_TOKENS, self._known.host_names
        return dict(zip(map(names.__getitem__, found), map(unit.__mul__, found.values())))  # there may be many hosts

    def begin(self, sequence: Sequence, placement: Placement) -> Refusal | None:
        """Begin an attempt. Return None if it has begun, otherwise the refusal.

        Raises InvalidRequestError if no host of this kind ever has enough blocks.
        """
        assert placement.decode is not None
        decode = self._known.workers[placement.decode.worker_id]
        prefill = None if placement.prefill is None else self._known.workers[placement.prefill.worker_id]
        if not decode.has_room:
            return decode.name
        if prefill is not None and not prefill.has_room:
            return prefill.name
        self._set_workers(sequence, Workers(decode, prefill))
        sequence.attempt += 1
        used = [worker for worker in self._workers[sequence] if worker is not None]
        if (refusing := hold_all([worker.adapters for worker in used], sequence, self._events.now)) is not None:
            return used[refusing].name
        if placement.source:
            self._fetch(sequence, placement)
        elif (refusal := self._reserve(sequence, placement.least_cached_tokens)) is not None:
            for worker in used:
                worker.adapters.let_go(sequence)
            return refusal
        if sequence.placed < 0:
            sequence.placed = self._events.now
        tokens = sequence.context - placement.cached_tokens
        computing = prefill or decode
        for worker in {decode, computing}:
            worker.admitted[sequence] = None
            self._known.calls[worker.name].begin_call(tokens if worker is computing else 0, sequence.adapter)
        sequence.sent = tokens
        if not placement.source:
            self._start(sequence)
        return None

    def move(self, sequence: Sequence) -> None:
        """End an attempt. Its request continues on another worker."""
        self.leave(sequence)
        self._on_lost(sequence)

    def leave(self, sequence: Sequence, grace: float = 0.0) -> None:
        """End an attempt on all of its workers.

        Args:
            grace: seconds for which the blocks stay in use, because a worker may still touch them.
        """
        now = self._events.now
        sequence.attempt += 1
        workers = self._workers.pop(sequence, None)
        used = [] if workers is None else [worker for worker in workers if worker is not None]
        for worker in used:
            worker.adapters.let_go(sequence)
            if sequence in worker.preempted:
                worker.preempted.remove(sequence)
            if worker.admitted.pop(sequence, 0) is None or worker.state == "gone":
                worker.remove(sequence)
                if (calls := self._known.calls.get(worker.name)) is not None:
                    if workers is not None and worker is workers.computing and sequence.sent:
                        calls.computed(sequence.sent)
                    calls.end_call()
        sequence.sent = 0
        for worker in used:
            held = sequence.held.pop(worker.host.name, None)
            if held is not None:
                self._events.at(now + grace, self._release, worker.host, held.session, held.key)
        sequence.is_handed_over = sequence.changes_hosts = False
        self._on_room()

    # ---- what workers do

    def computed(self, worker: SimulatedWorker, sequence: Sequence, tokens: int) -> None:
        """Publish the blocks of a chunk, and hand the request over after the last one."""
        now = self._events.now
        worker.host.seal(sequence, sequence.computed, now)
        if sequence.is_computing:
            return
        sequence.done += 1
        self._recorder.first_token(sequence, now + self._delay(self._profile.first_token))
        self._on_first_token(sequence)
        self._known.calls[worker.name].computed(sequence.sent)
        sequence.sent = 0
        decode = self._workers[sequence].decode
        if worker is not decode:
            worker.admitted.pop(sequence, None)
            worker.adapters.let_go(sequence)
            self._known.calls[worker.name].end_call()
            self._on_room()
        if sequence.left == 0:
            self.ended(decode, sequence)
        elif worker is decode:
            self._decode(sequence)
        else:
            ready = now
            if worker.host is not decode.host:
                last = tokens * self._profile.token_bytes / self._profile.transfer_bytes
                ready = max(sequence.moved, now + last + self._profile.transfer_seconds)
            delay = self._delay(self._profile.handoff) + self._delay(decode.kit.times.join)
            self._events.at(ready + delay, self._hand_over, sequence, sequence.attempt)

    def ended(self, worker: SimulatedWorker, sequence: Sequence) -> None:
        """End a request that has all of its tokens."""
        now = self._events.now
        if sequence.held:
            worker.host.seal(sequence, sequence.prompt_tokens + sequence.done - 1, now)
        at = sequence.first_token if sequence.answer_tokens == 1 else now + self._profile.token.at(0, 0.5)
        self._recorder.ended(sequence, at)
        sequence.is_over = True
        self.leave(sequence)
        self._on_ended(sequence)

    def needs_blocks(self, worker: SimulatedWorker, row: SimulatedRow) -> None:
        """Give a row more blocks, or preempt a sequence of its worker."""
        self._preemption.extend(worker, row)

    def stepped(self, worker: SimulatedWorker, run: Run) -> None:
        """Pass the ended steps of a worker on to the recorder."""
        self._recorder.stepped(worker, run)
        self._on_steps(worker, run)

    # ---- between workers

    def _fetch(self, sequence: Sequence, placement: Placement) -> None:
        """Fetch a prefix to the computing worker's host before the attempt continues."""
        host = self._workers[sequence].computing.host
        blocks = placement.cached_tokens // self._block_tokens
        here = self.cached_tokens(sequence, blocks).get(host.name, 0)
        at = host.receive(placement.cached_tokens - here, self._events.now)
        self._events.at(at, self._fetched, sequence, sequence.attempt, host, blocks)

    def _fetched(self, sequence: Sequence, attempt: int, host: Host, blocks: int) -> None:
        host.store(sequence, blocks, self._events.now)
        if sequence.attempt != attempt:
            return
        if self._reserve(sequence, 0) is None:
            self._start(sequence)
        else:
            self.move(sequence)

    def _reserve(self, sequence: Sequence, least_cached: int) -> Refusal | None:
        """Reserve blocks for an attempt. Return the same as `begin`."""
        now, (decode, prefill) = self._events.now, self._workers[sequence]
        try:
            cached = decode.host.reserve(sequence, decode.session, now)
        except BusyError:
            return decode.name
        if prefill is None and cached < least_cached:
            decode.host.release(sequence, now)
            return decode.host.name, cached
        if prefill is not None and prefill.host is not decode.host:
            try:
                here = prefill.host.reserve(sequence, prefill.session, now)
            except BusyError:
                decode.host.release(sequence, now)
                return prefill.name
            sequence.moved = decode.host.receive(sequence.context - cached, now)
            decode.host.open(sequence, TRANSFER, now)
            cached = here
        elif prefill is not None:
            decode.host.open(sequence, prefill.session, now)
        sequence.cached = sequence.computed = cached
        return None

    def _start(self, sequence: Sequence) -> None:
        if sequence.adapters_at > self._events.now:
            self._events.at(sequence.adapters_at, self._start_if_current, sequence, sequence.attempt)
            return
        computing = self._workers[sequence].computing
        self._recorder.started(sequence, self._events.now)
        computing.clock.delay_prompts(computing.kit.times.arrival)
        if computing.cores is None:
            self._join(sequence, sequence.attempt)
        else:
            computing.cores.admit(partial(self._join, sequence, sequence.attempt))

    def _start_if_current(self, sequence: Sequence, attempt: int) -> None:
        if sequence.attempt == attempt and sequence in self._workers:
            self._start(sequence)

    def _join(self, sequence: Sequence, attempt: int) -> None:
        """Let a prompt join its worker, after the measured delays of an admission."""
        if sequence.attempt != attempt or sequence not in self._workers:
            return
        computing = self._workers[sequence].computing
        delay = self._delay(self._profile.admit) + self._delay(computing.kit.times.join)
        if (cores := computing.cores) is not None:
            delay = max(0.0, delay - cores.turns.admission)  # this part of the delay is over already
            if computing.role == "prefill" and cores.decodes:
                delay += self._delay(cores.turns.admit)
        self._events.after(delay, self._compute, sequence, attempt)

    def _compute(self, sequence: Sequence, attempt: int) -> None:
        if sequence.attempt == attempt and sequence in self._workers:
            self._workers[sequence].computing.compute(sequence)

    def _hand_over(self, sequence: Sequence, attempt: int) -> None:
        if sequence.attempt != attempt or not sequence.is_handed_over:
            return
        now, (decode, prefill) = self._events.now, self._workers[sequence]
        assert prefill is not None
        if prefill.host is not decode.host:
            prefill.host.release(sequence, now)
            decode.host.seal(sequence, sequence.context, now)
        decode.host.hand_over(sequence, decode.session, now)
        self._set_workers(sequence, Workers(decode, None))
        self._decode(sequence)

    def _decode(self, sequence: Sequence) -> None:
        decode = self._workers[sequence].decode
        if decode.state == "draining":
            self.move(sequence)
        else:
            decode.decode(sequence, sequence.held[decode.host.name].capacity)

    def _set_workers(self, sequence: Sequence, workers: Workers) -> None:
        self._workers[sequence] = workers
        sequence.is_handed_over = workers.prefill is not None
        sequence.changes_hosts = workers.computing.host is not workers.decode.host

    def _release(self, host: Host, session: int, key: object) -> None:
        host.ledger.release(session, key, self._events.now)  # type: ignore[arg-type]
        self._on_room()
        self._preemption.retry(host)

    def _delay(self, delay: Delay) -> float:
        return delay.at(0, self._random.random())
