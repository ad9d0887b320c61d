"""The gateway of a simulation: the real router and the real counts of calls, with requests that only take time.

The life of a request is that of docs/design.md: placement, admission by the decode worker with its blocks, the prompt,
the handoff, decoding, the end. A request whose worker ends goes on elsewhere from the tokens that it has.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from paceline.core.block_holders import BlockHolders
from paceline.core.errors import BusyError, InvalidRequestError
from paceline.core.kv_layout import BASE_TOKENS
from paceline.core.step_times import Delay, Profile
from paceline.services.gateway.router import Need, Placement, place
from paceline.services.kvtransfer.lease import TRANSFER
from paceline.services.kvtransfer.lease_book import GRACE_SECONDS
from paceline.simulator.events import Events
from paceline.simulator.host import Host
from paceline.simulator.known_workers import KnownWorkers
from paceline.simulator.recorder import Recorder
from paceline.simulator.rows import Row
from paceline.simulator.sequence import Sequence
from paceline.simulator.steps import Run
from paceline.simulator.trace import TraceRequest
from paceline.simulator.waiting_queue import WaitingQueue
from paceline.simulator.worker import Worker

MOST_REFUSALS = 16
"""Workers that refuse a request in a row before it waits. A gateway would ask all others first; in a fleet that is full
this makes no difference but takes time."""


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The options of `paceline gateway` that matter here."""

    queue_seconds: float = 60.0
    max_waiting: int = 1_000_000
    local_prefill_tokens: int = 32


class Gateway:
    """Runs requests on workers.

    Args:
        seed: decides the delays of the gateway and of handoffs.
        on_over: called when a request has ended or was refused.
    """

    def __init__(
        self,
        events: Events,
        profile: Profile,
        block_tokens: int,
        hints: BlockHolders,
        recorder: Recorder,
        options: GatewayOptions,
        seed: int,
        on_over: Callable[[Sequence], None],
    ) -> None:
        self.known = KnownWorkers(events, profile.max_model_len)
        self._events, self._profile, self._recorder, self._hints = events, profile, recorder, hints
        self._options = options
        self._block_tokens = block_tokens
        self._random = random.Random(seed)
        self._on_over = on_over
        self._queue = WaitingQueue()
        self._is_waking = False
        self.on_steps: Callable[[Worker, Run], object] = lambda worker, run: None
        """Called after steps of a worker."""

    # ---- the fleet

    def join(self, worker: Worker) -> None:
        """Give work to a worker that is ready."""
        self.known.join(worker)
        self._wake()

    def drain(self, worker: Worker) -> None:
        """Give a worker nothing new, and move its decoding sequences to others that have room for them."""
        self.known.withdraw(worker)
        for sequence in list(worker.admitted):
            if sequence.decode is worker and worker.rows.has(sequence):
                self._leave(sequence)
                self._enter_first(sequence)

    def lose(self, worker: Worker) -> None:
        """Let the requests of a worker that has ended go on elsewhere."""
        self.known.withdraw(worker)
        for sequence in worker.stop():
            sequence.failed |= {worker.name}
            self._leave(sequence, GRACE_SECONDS)
            self._enter_first(sequence)
        self.known.forget(worker)

    # ---- arrival and placement

    def arrive(self, number: int, request: TraceRequest, names: list[bytes]) -> None:
        """Take a request of a trace.

        Args:
            names: names of its full blocks.
        """
        sequence = Sequence(
            number, self._events.now, request.prompt_tokens, request.answer_tokens, request.group, names
        )
        self._recorder.arrived(sequence)
        self._events.after(self._delay(self._profile.gateway, request.prompt_tokens), self._enter, sequence)

    @property
    def waiting(self) -> dict[Sequence, None]:
        """The requests for which no worker has room, in the order in which they began to wait."""
        return self._queue.waiting

    def _enter(self, sequence: Sequence) -> None:
        if self.waiting or not self._try(sequence):
            if sequence.is_over:
                return
            if len(self.waiting) >= self._options.max_waiting:
                self._refuse(sequence)
                return
            self._queue.add(sequence, first=False)
            self._events.after(self._options.queue_seconds, self._give_up, sequence)

    def _enter_first(self, sequence: Sequence) -> None:
        """Let a request that lost its worker go on before all others."""
        self._queue.add(sequence, first=True)
        self._wake()

    def _give_up(self, sequence: Sequence) -> None:
        if sequence in self.waiting and sequence.placed < 0:
            self._refuse(sequence)

    def _refuse(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)
        sequence.is_over = True
        self._recorder.refused(sequence)
        self._on_over(sequence)

    def _wake(self) -> None:
        if self.waiting and not self._is_waking:
            self._is_waking = True
            self._events.after(0.0, self._serve_queue)

    def _serve_queue(self) -> None:
        """Place waiting requests, until one finds no room."""
        self._is_waking = False
        self._queue.serve(lambda sequence: self._try(sequence) or sequence.is_over)

    def _cached_blocks(self, sequence: Sequence, most: int) -> dict[int, int]:
        """Return for each host how many of a context's first `most` blocks it has. Hosts with none are left out."""
        found = self._hints.cached_tokens(sequence.block_names(most), most * BASE_TOKENS)
        return {host: tokens // BASE_TOKENS for host, tokens in found.items()}

    def _try(self, sequence: Sequence) -> bool:
        """Place a request on workers that admit it. Return False if none does."""
        sequence.context = sequence.prompt_tokens + sequence.done
        sequence.computed = 0
        most = (sequence.context - 1) // self._block_tokens
        found = self._cached_blocks(sequence, most)
        cached = {self.known.hosts[host].name: blocks * self._block_tokens for host, blocks in found.items()}
        refused: frozenset[str] = frozenset()
        while len(refused) < MOST_REFUSALS:
            need = Need(
                sequence.prompt_tokens + sequence.answer_tokens,
                prompt_tokens=sequence.context,
                cached=cached,
                refused=refused,
                failed=sequence.failed,
                local_tokens=self._options.local_prefill_tokens,
            )
            placement = place(need, self.known.candidates())
            if placement is None:
                return False
            try:
                refusal = self._admit(sequence, placement)
            except InvalidRequestError:
                self._refuse(sequence)
                return False
            if refusal is None:
                return True
            if isinstance(refusal, str):
                refused |= {refusal}
            else:
                cached[refusal[0]] = refusal[1]
        return False

    def _admit(self, sequence: Sequence, placement: Placement) -> str | tuple[str, int] | None:
        """Begin an attempt. Return None, or the name of the worker that refuses, or a host and what it really has
        cached."""
        assert placement.decode is not None
        decode = self.known.workers[placement.decode.worker_id]
        prefill = None if placement.prefill is None else self.known.workers[placement.prefill.worker_id]
        if not decode.has_room:
            return decode.name
        if prefill is not None and not prefill.has_room:
            return prefill.name
        sequence.decode, sequence.prefill = decode, prefill
        sequence.attempt += 1
        if placement.source:
            self._fetch(sequence, placement)
        elif (refusal := self._reserve(sequence, placement.least_cached_tokens)) is not None:
            return refusal
        if sequence.placed < 0:
            sequence.placed = self._events.now
        tokens = sequence.context - placement.cached_tokens
        computing = prefill or decode
        for worker in {decode, computing}:
            worker.admitted[sequence] = None
            self.known.calls[worker.name].begin_call(tokens if worker is computing else 0)
        sequence.sent = tokens
        if not placement.source:
            self._start(sequence)
        return None

    def _fetch(self, sequence: Sequence, placement: Placement) -> None:
        """Have a prefix brought to the computing worker's host before the attempt goes on."""
        host = (sequence.prefill or sequence.decode).host  # type: ignore[union-attr]
        blocks = placement.cached_tokens // self._block_tokens
        here = self._cached_blocks(sequence, blocks).get(host.number, 0)
        at = host.receive((blocks - here) * self._block_tokens, self._events.now)
        self._events.at(at, self._fetched, sequence, sequence.attempt, host, blocks)

    def _fetched(self, sequence: Sequence, attempt: int, host: Host, blocks: int) -> None:
        host.store(sequence, blocks, self._events.now)
        if sequence.attempt != attempt:
            return
        if self._reserve(sequence, 0) is None:
            self._start(sequence)
        else:
            self._leave(sequence)
            self._enter_first(sequence)

    def _reserve(self, sequence: Sequence, least_cached: int) -> str | tuple[str, int] | None:
        """Reserve blocks for an attempt. Return the same as `_admit`."""
        now, decode, prefill = self._events.now, sequence.decode, sequence.prefill
        assert decode is not None
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
        computing = sequence.prefill or sequence.decode
        assert computing is not None
        self._recorder.started(sequence, self._events.now)
        delay = self._delay(self._profile.admit) + self._delay(computing.kit.times.join)
        self._events.after(delay, self._compute, sequence, sequence.attempt)

    def _compute(self, sequence: Sequence, attempt: int) -> None:
        computing = sequence.prefill or sequence.decode
        if sequence.attempt == attempt and computing is not None:
            computing.compute(sequence)

    # ---- what workers do

    def computed(self, worker: Worker, sequence: Sequence, tokens: int) -> None:
        """Publish the blocks of a chunk, and hand the request over after the last one."""
        now = self._events.now
        worker.host.seal(sequence, sequence.computed, now)
        if sequence.is_computing:
            return
        sequence.done += 1
        self._recorder.first_token(sequence, now + self._delay(self._profile.first_token))
        self.known.calls[worker.name].computed(sequence.sent)
        sequence.sent = 0
        decode = sequence.decode
        assert decode is not None
        if worker is not decode:
            worker.admitted.pop(sequence, None)
            self.known.calls[worker.name].end_call()
            self._wake()
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

    def _hand_over(self, sequence: Sequence, attempt: int) -> None:
        decode, prefill, now = sequence.decode, sequence.prefill, self._events.now
        if sequence.attempt != attempt or decode is None or prefill is None:
            return
        if prefill.host is not decode.host:
            prefill.host.release(sequence, now)
            decode.host.seal(sequence, sequence.context, now)
        decode.host.hand_over(sequence, decode.session, now)
        sequence.prefill = None
        self._decode(sequence)

    def _decode(self, sequence: Sequence) -> None:
        decode = sequence.decode
        assert decode is not None
        if decode.state == "draining":
            self._leave(sequence)
            self._enter_first(sequence)
        else:
            decode.decode(sequence, sequence.held[decode.host.name].capacity)

    def ended(self, worker: Worker, sequence: Sequence) -> None:
        """End a request that has all of its tokens."""
        now = self._events.now
        if sequence.held:
            worker.host.seal(sequence, sequence.prompt_tokens + sequence.done - 1, now)
        at = sequence.first_token if sequence.answer_tokens == 1 else now + self._profile.token.at(0, 0.5)
        self._recorder.ended(sequence, at)
        sequence.is_over = True
        self._leave(sequence)
        self._on_over(sequence)

    def needs_blocks(self, worker: Worker, row: Row) -> None:
        """Give a row more blocks. If there are none, the newest sequence of the worker gives back its own."""
        sequence, now = row.sequence, self._events.now
        length = worker.rows.length(row)
        worker.host.seal(sequence, length - 1, now)
        while row.is_here:
            try:
                worker.rows.grown(row, worker.host.extend(sequence, length, now))
                return
            except BusyError:
                self._preempt(worker, next((own for own in reversed(worker.admitted) if own.held), sequence))

    def _preempt(self, worker: Worker, sequence: Sequence) -> None:
        """Take the blocks of a sequence."""
        self._recorder.preemptions += 1
        if worker.rows.has(sequence):
            # It keeps its place, and computes its context again when there are other blocks.
            worker.rows.leave(sequence)
            worker.host.release(sequence, self._events.now)
            sequence.attempt += 1
            worker.preempted.append(sequence)
        else:  # Another worker may be computing its prompt.
            self._leave(sequence)
            self._enter_first(sequence)

    def _retry_preempted(self, host: Host) -> None:
        """Let sequences of a host that were preempted go on, in order, if there are blocks."""
        for worker in host.workers:
            while worker.preempted and worker.state == "ready":
                sequence = worker.preempted[0]
                sequence.context = sequence.prompt_tokens + sequence.done
                sequence.attempt += 1
                try:
                    sequence.cached = sequence.computed = host.reserve(sequence, worker.session, self._events.now)
                except BusyError:
                    break
                worker.preempted.pop(0)
                worker.compute(sequence)

    def stepped(self, worker: Worker, run: Run) -> None:
        self._recorder.stepped(worker, run)
        self.on_steps(worker, run)

    # ---- leaving

    def _leave(self, sequence: Sequence, grace: float = 0.0) -> None:
        """End an attempt on all of its workers.

        Args:
            grace: seconds for which the blocks stay in use, because a worker may still touch them.
        """
        now = self._events.now
        sequence.attempt += 1
        workers = [own for own in (sequence.decode, sequence.prefill) if own is not None]
        for worker in workers:
            if sequence in worker.preempted:
                worker.preempted.remove(sequence)
            if worker.admitted.pop(sequence, 0) is None or worker.state == "gone":
                worker.remove(sequence)
                if (calls := self.known.calls.get(worker.name)) is not None:
                    if worker is (sequence.prefill or sequence.decode) and sequence.sent:
                        calls.computed(sequence.sent)
                    calls.end_call()
        sequence.sent = 0
        for worker in workers:
            held = sequence.held.pop(worker.host.name, None)
            if held is not None:
                self._events.at(now + grace, self._release, worker.host, held.session, held.key)
        sequence.decode = sequence.prefill = None
        self._wake()

    def _release(self, host: Host, session: int, key: object) -> None:
        host.ledger.release(session, key, self._events.now)  # type: ignore[arg-type]
        self._wake()
        if any(worker.preempted for worker in host.workers):
            self._retry_preempted(host)

    def _delay(self, delay: Delay, tokens: int = 0) -> float:
        return delay.at(tokens, self._random.random())
