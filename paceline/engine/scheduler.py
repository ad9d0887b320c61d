"""The scheduler chooses the tokens that each step computes. Pure: no clock, no I/O, no tensors.

A step is planned before the results of earlier steps are known (`plan` may be called again before `apply`), unless the
earlier step is long. The number of tokens that a step in flight gives a request has only bounds: at least one, at most
one more than its drafts. Blocks and limits are checked against the upper bound, and `apply` brings in the real number.
So a request's end is noticed late: the results of its steps in flight are then dropped, and its row and blocks are kept
until these steps are over.

Blocks are not allocated here. A request comes with blocks for its prompt. The scheduler asks for more blocks
(`NeedsBlocks`) some steps before these are full. The request continues meanwhile, and waits only if its blocks are
full. If there are no blocks (`starve`), the newest request is preempted (`Preempted`).

If the device computes in a pool of its own, requests enter the pool in the order of their arrival as soon as there is
room. If the requests in the pool outgrow it, the newest of them is swapped out: its blocks move to the arena, and come
back when there is room again.

Requests of the background come after all others: in steps, in the pool, and when blocks run out.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import Key
from paceline.engine.adapter_slots import AdapterSlots
from paceline.engine.background import ALL
from paceline.engine.chunk_planner import ChunkPlanner
from paceline.engine.compute_pool import ArenaPool, ComputePool, CopyBatch
from paceline.engine.limits import Limits
from paceline.engine.prompt_order import PromptOrder, is_long
from paceline.engine.request import Request, Residence
from paceline.engine.residents import Residents
from paceline.engine.results import Results
from paceline.engine.row_allocator import RowAllocator
from paceline.engine.speculation import Speculation
from paceline.engine.stats import SchedulerStats
from paceline.engine.step import Chunk, Event, Step, StepResult


class Scheduler:
    """The planner of one engine's steps. Each event reaches it as a call of a method.

    `Residents` keeps the place of each request, `ChunkPlanner` chooses how many of its tokens come next, and `Results`
    updates it with the results of chunks.
    """

    def __init__(self, limits: Limits, speculation: Speculation | None = None, pool: ComputePool | None = None) -> None:
        self._limits = limits
        self._pool = pool or ArenaPool()
        self._rows = RowAllocator(limits.max_seqs, limits.max_model_len)
        self._events: list[Event] = []
        self.stats = SchedulerStats()
        speculation = speculation or Speculation(most=limits.max_drafts)
        self._residents = Residents(self._pool, self._rows, self.stats, self._emit)
        self._chunks = ChunkPlanner(limits, speculation, self._pool, self._residents, self._emit)
        self._prompts = PromptOrder(limits.max_batched_tokens)
        self._results = Results(limits, speculation, self._pool, self.stats)
        self._adapters = AdapterSlots(limits.max_adapters)

    def _emit(self, event: Event) -> None:
        self._events.append(event)

    def add(self, request: Request) -> None:
        """Add a request, which has the blocks for its context. Raises ValueError if its key is not new."""
        self._residents.add(request)

    def remove(self, key: Key) -> None:
        """Drop a request if the engine still has it. The event `Removed` follows when no step and no copy uses its
        blocks.
        """
        self._residents.remove(key)

    def grow(self, key: Key, tables: Sequence[list[int]]) -> None:
        """Give a request the blocks that it asked for. `tables` are its whole new tables."""
        self._residents.grow(key, tables)

    def starve(self, key: Key) -> None:
        """Note that the arena has no blocks for this request now. The newest request is preempted to make room; if
        there are requests of the background, the newest of them is.
        """
        self._residents.starve(key)

    def provide(self, key: Key, span: int, slots: Sequence[int]) -> None:
        """Give a request the slots of a span's encoding. Before this call, no token of the span is computed.

        The encoding must stay in these slots until the span is computed, or until `Removed` or `Preempted` has come.

        Args:
            span: index of the span in the request's context.
            slots: slots of the arena with the blocks of the encoding, in order.
        """
        if request := self._residents.find(key):
            request.encodings[span] = tuple(slots)
            self._rows.encode(request, span)

    def forget(self) -> int:
        """Forget the blocks of the device's own pool that no request uses. Return the number of forgotten blocks."""
        return self._pool.forget()

    # ---- planning

    def classes(self) -> tuple[bool, bool]:
        """Return whether there are urgent requests, and whether there are requests of the background."""
        return self._residents.classes()

    def plan(self, background: int = ALL, now: float = 0.0) -> Step | None:
        """Return the next step, or None if no request can continue now.

        Every decoding request gets a token. If prompts wait, drafts get at most half of the remaining tokens. Prompts
        share the rest by the rule of `PromptOrder`. A prompt waits before a span of media whose encoding is missing,
        and any request waits while other adapters have their turn in the slots (`AdapterSlots`).

        Args:
            background: largest number of background requests that decode in this step; ALL also computes their prompts.
            now: the present instant, in seconds of any clock.
        """
        self._residents.begin_plan()
        requests = self._residents.by_urgency()
        if background < ALL:
            urgent = [request for request in requests if not request.background]
            requests = urgent + [each for each in requests[len(urgent) :] if each.decodes][:background]
        if self._limits.max_adapters:
            self._begin_adapters(requests, is_own=background >= ALL)
        decoding = [
            request
            for request in requests
            if request.decodes and self._adapters.fits(request.context.adapter) and self._residents.can_run(request)
        ]
        prompts = [request for request in requests if not request.decodes and request.left_len]
        budget = self._limits.max_batched_tokens - len(decoding)
        drafts = budget // 2 if prompts else budget
        chunks: list[Chunk] = []
        for request in decoding:
            if chunk := self._chunks.decode_chunk(request, drafts):
                chunks.append(chunk)
                self._adapters.want(request.context.adapter)
                drafts -= chunk.length - 1
                budget -= chunk.length - 1
        in_step = len(chunks)

        def add_prompt(request: Request, tokens: int) -> int:
            chunk, adapter = None, request.context.adapter
            if self._adapters.fits(adapter) and self._residents.can_run(request):
                chunk = self._chunks.prompt_chunk(request, tokens, is_first=len(chunks) == in_step)
            if chunk is None:
                return 0
            self._adapters.want(adapter)
            chunks.append(chunk)
            return chunk.length

        self._prompts.share(prompts, budget, self.stats.prefill_tokens_per_second, add_prompt, now)
        if not chunks:
            return None
        return Step(tuple(chunks), self._rows.take_updates(), self._adapters.place())

    def _begin_adapters(self, requests: Sequence[Request], is_own: bool) -> None:
        """Choose the adapters that the step may have.

        Args:
            is_own: whether the step is meant for the background, too.
        """
        adapted = [
            each
            for each in requests
            if each.context.adapter and each.place is Residence.RUNNING and (each.decodes or each.left_len)
        ]
        self._adapters.begin(
            (each.context.adapter for each in adapted if not each.background),
            (each.context.adapter for each in adapted if each.background),
            is_own,
        )

    def is_long(self, step: Step) -> bool:
        """Return whether a step takes so long that the step after it should not be planned before it ends."""
        prompts = sum(chunk.length for chunk in step.chunks if not chunk.follows)
        return is_long(prompts, self.stats.prefill_tokens_per_second)

    # ---- results

    def apply(self, step: Step, result: StepResult) -> None:
        """Update requests with the results of the oldest step in flight."""
        self._results.observe(step, result)
        stats = self.stats
        before = stats.prompt_tokens + stats.sampled_tokens
        drafter_lengths = result.drafter_lengths or [0] * len(step.chunks)
        for chunk, chunk_result, drafter_len in zip(step.chunks, result.chunks, drafter_lengths, strict=True):
            request = self._residents.find_in_step(chunk.key)
            if request.place not in (Residence.ENDED, Residence.REMOVED):
                events, is_over = self._results.apply(request, chunk, chunk_result, drafter_len, result.seconds)
                self._events += events
                if is_over:
                    self._residents.end(request)
            self._residents.land(request)
        stats.count_iteration(stats.prompt_tokens + stats.sampled_tokens - before)

    def take_copies(self) -> list[CopyBatch]:
        """Admit requests to the pool. Then return the batches of copies between pool and arena since the last call, in
        order.
        """
        self._residents.admit()
        return self._pool.take_copies()

    def finish_copies(self, copies: CopyBatch, seconds: float, waited_seconds: float, from_device: int = 0) -> None:
        """Note that a batch was copied.

        Args:
            seconds: duration of the copying.
            waited_seconds: time from the batch's submission to the beginning of its copying.
            from_device: number of the batch's loaded blocks that came from other pools of the device.
        """
        copies.request.stats.device_blocks += from_device
        self.stats.count_copies(
            len(copies.loads) - from_device, from_device, len(copies.stores), waited_seconds + seconds
        )
        self._residents.finish_copies(copies, seconds)

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check(self) -> list[str]:
        """Return errors in requests, rows and blocks, as sentences; an empty list if there are none."""
        return self._residents.check()
