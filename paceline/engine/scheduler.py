"""The scheduler chooses the tokens that each step computes. Pure: no clock, no I/O, no tensors.

A step is planned before the results of earlier steps are known (`plan` may be called again before `apply`), unless the
earlier step is long. The number of tokens that a step in flight gives a request has only bounds: at least one, at most
one more than its drafts. Blocks and limits are checked against the upper bound, and `apply` brings in the real number.
So the end of a request is found late: its results of steps in flight are dropped, and its row and blocks are kept until
these steps are over.

Blocks are not allocated here. A request comes with blocks for its prompt. Some steps before they are full, the
scheduler asks for more (`NeedsBlocks`), and the request continues meanwhile; it waits only if its blocks are full. If
there are no blocks (`starve`), the newest request is preempted (`Preempted`).

If the device computes in a pool of its own, requests enter the pool in the order of their arrival as soon as there is
room. If the requests in the pool outgrow it, the newest of them is swapped out: its blocks move to the arena, and come
back when there is room again.

Requests of the background come after all others: in steps, in the pool, and when blocks run out.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import Key
from paceline.engine.background import ALL
from paceline.engine.chunk_planner import ChunkPlanner
from paceline.engine.compute_pool import ArenaPool, ComputePool, CopyBatch
from paceline.engine.limits import Limits
from paceline.engine.prompt_order import PromptOrder, is_long
from paceline.engine.request import Request
from paceline.engine.results import Results
from paceline.engine.row_allocator import RowAllocator
from paceline.engine.speculation import Speculation
from paceline.engine.stats import SchedulerStats
from paceline.engine.step import Chunk, Event, Preempted, Removed, Step, StepResult


class Scheduler:
    """The owner of the running requests. Its methods tell it everything that happens."""

    def __init__(self, limits: Limits, speculation: Speculation | None = None, pool: ComputePool | None = None) -> None:
        self._limits = limits
        self._speculation = speculation or Speculation(most=limits.max_drafts)
        self._pool = pool or ArenaPool()
        self._requests: dict[Key, Request] = {}  # in order of arrival
        self._leaving: dict[Key, tuple[Request, Event | None]] = {}  # still in steps or copies; event to send last
        self._grown: dict[Key, Request] = {}  # have new blocks in the arena, but not yet in the pool
        self._rows = RowAllocator(limits.max_seqs, limits.max_model_len)
        self._events: list[Event] = []
        self._made_room = False
        self._starved: list[Request] = []
        self.stats = SchedulerStats()
        self._chunks = ChunkPlanner(limits, self._speculation, self._pool, self._emit)
        self._prompts = PromptOrder(limits.max_batched_tokens)
        self._results = Results(limits.max_model_len, self._speculation, self._pool, self.stats)

    def _emit(self, event: Event) -> None:
        self._events.append(event)

    def add(self, request: Request) -> None:
        """Add a request, which has the blocks for its context. Raises ValueError if its key is not new."""
        if request.key in self._requests or request.key in self._leaving:
            raise ValueError(f"{request.key} is already running")
        self._requests[request.key] = request

    def remove(self, key: Key) -> None:
        """Drop a request if it is still here. `Removed` follows when neither a step nor a copy uses its blocks."""
        leaving, _ = self._leaving.get(key, (None, None))
        request = self._requests.pop(key, leaving)
        if request is None:
            self._events.append(Removed(key))
        else:
            self._leave(request, Removed(key))

    def grow(self, key: Key, tables: Sequence[list[int]]) -> None:
        """Give a request the blocks that it asked for. `tables` are its whole new tables."""
        if request := self._requests.get(key):
            for own, new in zip(request.tables, tables):
                own.extend(new[len(own) :])
            request.growing = False
            self._grown[key] = request

    def starve(self, key: Key) -> None:
        """Note that there are no blocks for this request now. The newest request is preempted to make room, one of the
        background if there is any."""
        if (request := self._requests.get(key)) is None:
            return
        self._starved.append(request)
        # If a request was preempted since the last plan, or still leaves, its blocks may suffice.
        if not self._made_room and not any(map(self._is_preempted, self._leaving)):
            victim = self._requests.pop(self._by_urgency()[-1].key)
            self._made_room = True
            self.stats.preemptions += 1
            self._leave(victim, Preempted(victim.key))
        self._ask_again()

    def provide(self, key: Key, span: int, slots: Sequence[int]) -> None:
        """Tell a request where the encoding of one of its spans is. Until then, no token of the span is computed.

        The encoding must stay there until the span is computed, or `Removed` or `Preempted` has come.

        Args:
            span: index of the span in the request's context.
            slots: slots of the arena with the blocks of the encoding, in order.
        """
        if request := self._requests.get(key):
            request.encodings[span] = tuple(slots)
            self._rows.encode(request, span)

    def forget(self) -> int:
        """Forget the blocks of the device's own pool that no request uses. Return how many there were."""
        return self._pool.forget()

    # ---- planning

    def classes(self) -> tuple[bool, bool]:
        """Return whether there are urgent requests, and whether there are requests of the background."""
        kinds = {request.background for request in self._requests.values()}
        return False in kinds, True in kinds

    def plan(self, background: int = ALL, now: float = 0.0) -> Step | None:
        """Return the next step, or None if no request can continue now.

        Every decoding request gets a token. If prompts wait, drafts get at most half of the remaining tokens. Prompts
        share the rest, see `PromptOrder`. A prompt waits before a span of media whose encoding is not there.

        Args:
            background: most requests of the background that decode in this step. Their prompts are computed only if it
                is ALL.
            now: the present instant, in seconds of any clock.
        """
        self._made_room = False
        self._settle_in()
        requests = self._by_urgency()
        if background < ALL:
            urgent = [request for request in requests if not request.background]
            requests = urgent + [each for each in requests[len(urgent) :] if each.decodes][:background]
        decoding = [request for request in requests if request.decodes and self._can_run(request)]
        prompts = [request for request in requests if not request.decodes]
        budget = self._limits.max_batched_tokens - len(decoding)
        drafts = budget // 2 if prompts else budget
        chunks: list[Chunk] = []
        for request in decoding:
            if chunk := self._chunks.decode_chunk(request, drafts):
                chunks.append(chunk)
                drafts -= chunk.length - 1
                budget -= chunk.length - 1
        in_step = len(chunks)

        def take(request: Request, tokens: int) -> int:
            chunk = None
            if self._can_run(request):
                chunk = self._chunks.prompt_chunk(request, tokens, is_first=len(chunks) == in_step)
            if chunk is None:
                return 0
            chunks.append(chunk)
            return chunk.length

        self._prompts.share(prompts, budget, self.stats.prefill_tokens_per_second, take, now)
        if not chunks:
            return None
        return Step(tuple(chunks), self._rows.take_updates())

    def is_long(self, step: Step) -> bool:
        """Return whether a step takes so long that the step after it should not be planned before it ends."""
        prompts = sum(chunk.length for chunk in step.chunks if not chunk.follows)
        return is_long(prompts, self.stats.prefill_tokens_per_second)

    def _by_urgency(self) -> list[Request]:
        """Return all requests in order of arrival, those of the background last."""
        return sorted(self._requests.values(), key=lambda request: request.background)

    def _settle_in(self) -> None:
        """Give requests slots in the pool while there is room.

        First come growing requests that are in the pool, then others in order of arrival, those of the background last.
        An urgent request takes the slots of the background.
        """
        for key, request in list(self._grown.items()):
            while not (request.pool_tables is None or request.swapping_out or self._pool.extend(request)):
                if not self._make_room():
                    return  # slots that become free are for the requests in the pool
            self._rows.extend(request)
            del self._grown[key]
        for request in self._by_urgency():
            while request.pool_tables is None:
                if self._pool.admit(request, self.stats.prefill_tokens_per_second):
                    break
                if request.background or not self._make_room(only_background=True):
                    return

    def _make_room(self, only_background: bool = False) -> bool:
        """Swap out the newest request in the pool, one of the background if there is any.

        Return whether its slots are free already.
        """
        there = [request for request in self._by_urgency() if request.pool_tables is not None]
        if any(request.swapping_out for request in there) or (only_background and not (there and there[-1].background)):
            return False
        last = there[-1]
        last.swapping_out = True
        self.stats.swap_outs += 1
        self._end_use(last)
        return not last.swapping_out

    def _can_run(self, request: Request) -> bool:
        """Return whether the request can run. Give it a row if it has none and one is free."""
        if request.pool_tables is None or request.swapping_in or request.swapping_out:
            return False
        return self._rows.assign(request)

    # ---- results

    def apply(self, step: Step, result: StepResult) -> None:
        """Bring requests up to date with the results of the oldest step in flight."""
        self._results.observe(step, result)
        stats = self.stats
        before = stats.prompt_tokens + stats.sampled_tokens
        drafter_lengths = result.drafter_lengths or [0] * len(step.chunks)
        for chunk, own, drafter_len in zip(step.chunks, result.chunks, drafter_lengths, strict=True):
            running = self._requests.get(chunk.key)
            request = running or self._leaving[chunk.key][0]
            request.in_flight -= 1
            if chunk.samples:
                request.unknown.popleft()
            if running or self._is_preempted(chunk.key):
                events, is_over = self._results.take(request, chunk, own, drafter_len, result.seconds)
                self._events += events
                if is_over:
                    self._requests.pop(chunk.key, None)
                    self._leave(request, None)
            self._end_use(request)
        stats.count_iteration(stats.prompt_tokens + stats.sampled_tokens - before)

    def take_copies(self) -> list[CopyBatch]:
        """Return new copies between pool and arena since the last call, in order. First admit requests to the pool."""
        self._settle_in()
        return self._pool.take_copies()

    def copied(self, copies: CopyBatch, seconds: float, waited_seconds: float, from_device: int = 0) -> None:
        """Note that a batch was copied.

        Args:
            seconds: time of the copying.
            waited_seconds: time from the batch's submission to its begin.
            from_device: number of its loaded blocks that came from other pools of the device.
        """
        copies.request.stats.device_blocks += from_device
        self.stats.count_copies(
            len(copies.loads) - from_device, from_device, len(copies.stores), waited_seconds + seconds
        )
        self._events += self._pool.copied(copies, seconds)
        self._end_use(copies.request)

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ---- leaving

    def _leave(self, request: Request, last_word: Event | None) -> None:
        self._leaving[request.key] = (request, last_word)
        self._grown.pop(request.key, None)
        self._end_use(request)

    def _end_use(self, request: Request) -> None:
        """Continue the end or the swap-out of a request, if no step or copy uses its blocks any more."""
        if request.idle and request.key in self._leaving:
            self._let_go(request)
        elif request.swapping_out and request.in_flight == 0:
            if request.row is not None:
                self._rows.release(request)
                self._events += self._pool.when_stored(request, [], whole=True)
            if request.copies == 0:
                self._pool.release(request)
                request.swapping_out = False

    def _let_go(self, request: Request) -> None:
        _, last_word = self._leaving.pop(request.key)
        self._rows.release(request)
        self._pool.release(request)
        if last_word is not None:
            self._events.append(last_word)
        self._ask_again()

    def _ask_again(self) -> None:
        """Let requests without blocks ask again with the next plan, unless a preempted request still has its blocks."""
        if self._starved and not any(map(self._is_preempted, self._leaving)):
            for request in self._starved:
                request.growing = False
            self._starved.clear()

    def _is_preempted(self, key: Key) -> bool:
        return key in self._leaving and isinstance(self._leaving[key][1], Preempted)
