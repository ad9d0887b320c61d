"""Updates of requests, of their blocks and of the counters with the results of steps."""

from __future__ import annotations

from paceline.core.context import Tail
from paceline.engine.compute_pool import ComputePool
from paceline.engine.limits import Limits
from paceline.engine.request import Request
from paceline.engine.speculation import Speculation
from paceline.engine.stats import SchedulerStats
from paceline.engine.step import (
    Chunk,
    ChunkResult,
    Computed,
    Event,
    Failed,
    Filled,
    Kept,
    Sampled,
    Scored,
    Sealed,
    SpareUnused,
    States,
    Step,
    StepResult,
    Trimmed,
)


class Results:
    """The part of the scheduler that updates requests with the results of steps.

    If the tokens of a context see each other, its blocks depend on later tokens than their names say. So they are never
    sealed.
    """

    def __init__(self, limits: Limits, speculation: Speculation, pool: ComputePool, stats: SchedulerStats) -> None:
        self._max_model_len = limits.max_model_len
        self._seals = not limits.bidirectional
        self._speculation = speculation
        self._pool = pool
        self._stats = stats

    def observe(self, step: Step, result: StepResult) -> None:
        """Measure a step for counters and for the choice of drafts. Only steps without prompts measure the cost of
        decoding.
        """
        self._stats.count_step(step, result)
        if all(chunk.follows for chunk in step.chunks):
            tokens = sum(1 + chunk.drafted for chunk in result.chunks if chunk.tokens)
            given = sum(len(chunk.tokens) for chunk in result.chunks)
            self._speculation.observe_step(tokens, given, result.drafted, result.seconds, result.draft_seconds)

    def apply(
        self, request: Request, chunk: Chunk, result: ChunkResult, drafter_len: int, seconds: float
    ) -> tuple[list[Event], bool]:
        """Update a request with the result of its chunk.

        Args:
            drafter_len: number of the request's tokens for which a draft model has KV of its own.
            seconds: duration of the whole step.

        Returns:
            Events in order, and whether the engine has finished the request.
        """
        if result.failure is not None:
            # The step's KV may be wrong, so its blocks are neither sealed nor handed over.
            self._count(request, chunk, result, 0)
            return [Failed(request.key, result.failure)], True
        events: list[Event] = self._keep_copies(request, chunk) if chunk.copies else []
        if chunk.prefills:
            events.append(Computed(request.key, chunk.start, chunk.length, seconds))
        if result.states is not None:
            events.append(States(request.key, chunk.end - chunk.states, result.states))
        if result.scores:
            events.append(Scored(request.key, chunk.start + 1, result.scores))
        sampled: list[Sampled] = []
        for token in result.tokens:
            request.token_ids.append(token.id)
            sampled.append(Sampled(request.key, token, request.finish_reason(self._max_model_len)))
            if sampled[-1].reason is not None:
                break
        # The newest token has no KV yet: it is the input of the next step.
        request.computed_len = len(request.token_ids) - 1 if chunk.samples else chunk.end
        request.planned_len = max(request.planned_len, request.computed_len)
        request.drafter_len = min(drafter_len, request.computed_len)  # drafts may have been rejected
        self._count(request, chunk, result, len(sampled))
        leaves = bool(sampled) and (sampled[-1].reason is not None or request.only_first_token)
        hands_over = leaves and sampled[-1].reason is None
        # The worker that takes over seals the blocks that this step has filled: a handoff does not wait for that.
        events += self._settle_blocks(request, reports=not hands_over or request.has_readers)
        events += sampled
        if hands_over:
            context_hash = request.context.name(request.layout.fingerprint, request.joined_len)
            filled = Filled(request.key, request.joined_len, context_hash)
            events += self._pool.hold_until_stored(request, [filled], whole=True)
        elif leaves and request.has_tail:
            kept = Kept(request.key, self._tail(request, request.computed_len))
            events += self._pool.hold_until_stored(request, [kept], whole=True)
        return events, leaves or request.is_computed

    def _keep_copies(self, request: Request, chunk: Chunk) -> list[Event]:
        """Return the event `Kept` for the blocks that were copied before a chunk, if it can be sent now, or
        `SpareUnused` if the copies are useless.

        Until now, it was not known whether the steps before the chunk filled these blocks in all groups.
        """
        if request.computed_len != chunk.start or not request.has_tail:
            self._pool.drop_tail(request)
            return [SpareUnused(request.key)]
        tail = self._tail(request, chunk.start)
        self._pool.store_tail(request, tail)
        return self._pool.hold_until_stored(request, [Kept(request.key, tail, copied=True)])

    def _tail(self, request: Request, length: int) -> Tail:
        return Tail(length, request.context.name(request.layout.fingerprint, length))

    def _count(self, request: Request, chunk: Chunk, result: ChunkResult, sampled: int) -> None:
        stats = self._stats
        stats.computed_tokens += 1 + result.drafted if chunk.follows else chunk.length
        stats.prompt_tokens += max(0, min(chunk.end, request.prompt_len) - chunk.start)
        stats.sampled_tokens += sampled
        request.stats.count(sampled, result.drafted, result.accepted)
        if result.drafted and result.tokens:
            assert request.acceptance is not None
            self._speculation.observe_drafts(request.acceptance, result.drafted, result.accepted)
            stats.count_drafts(result.drafted, result.accepted)

    def _settle_blocks(self, request: Request, reports: bool) -> list[Event]:
        """Seal full blocks and drop blocks before a window.

        Args:
            reports: send events about them.
        """
        events: list[Event] = []
        for index in range(len(request.tables) if self._seals else 0):
            first, hashes = request.seal_full_blocks(index)
            if hashes:
                self._pool.note_sealed(request, index, first, hashes)
                events.append(Sealed(request.key, index, first, hashes))
            if first_kept := request.trim_behind_window(index):
                self._pool.note_trimmed(request, index, first_kept)
                events.append(Trimmed(request.key, index, first_kept))
        return self._pool.hold_until_stored(request, events if reports else [])
