"""The choice of the next chunk of one request, and of the time at which the request asks for more blocks."""

from __future__ import annotations

from collections.abc import Callable

from paceline.engine.compute_pool import ComputePool
from paceline.engine.limits import Limits
from paceline.engine.prompt_order import piece_of
from paceline.engine.request import Request
from paceline.engine.residents import Residents
from paceline.engine.speculation import Speculation
from paceline.engine.step import Chunk, SpareUnused

GROWTH_TOKENS = 64
"""Number of further tokens for which a request asks for blocks at once. With a larger number, requests ask less
often.
"""

LOOKAHEAD_TOKENS = 16
"""A request asks for more blocks when fewer tokens than this fit into its blocks, so that the answer comes in time."""

LAST_CHUNK_TOKENS = 128
"""Number of tokens of a prompt's last chunk if another host reads the blocks as they become full. After the last step,
the other host has to wait only for this chunk.
"""


class ChunkPlanner:
    """Chooses how many tokens of a request the next step computes, and launches them.

    Args:
        pool: the memory in which the device computes.
        residents: notes each launch, and asks for blocks.
        emit: called when a request does not need its spare blocks.
    """

    def __init__(
        self,
        limits: Limits,
        speculation: Speculation,
        pool: ComputePool,
        residents: Residents,
        emit: Callable[[SpareUnused], None],
    ) -> None:
        self._limits = limits
        self._speculation = speculation
        self._pool = pool
        self._residents = residents
        self._emit = emit

    def decode_chunk(self, request: Request, drafts: int) -> Chunk | None:
        """Return the next chunk of a decoding request: its newest token, and at most `drafts` drafts after it.

        Returns None if the request's blocks are full, or if the request ends with the steps in flight.
        """
        self._ask_for_blocks(request)
        limit = request.limit(self._limits.max_model_len)
        capacity = request.capacity_of(self._pool.tables(request))
        least, most = request.least_len, request.most_len
        if least >= limit or most > capacity:
            return None
        room = min(drafts, limit - least - 1, capacity - most)
        return self._launch(request, most - 1, 1 + min(request.drafts, room), follows=True, samples=True)

    def prompt_chunk(self, request: Request, budget: int, is_first: bool) -> Chunk | None:
        """Return the next chunk of a prompt: at most `budget` tokens, or a longer span of media that must not be cut.
        If the prompt has readers, its last tokens are left to a chunk of their own. A model whose tokens all see each
        other gets the whole prompt.

        Returns None if the request's blocks are full, if the encoding of its next span is missing, or if this span does
        not fit.

        Args:
            is_first: whether the step has no prompt yet. Otherwise no span may be longer than the budget, because the
                first token of another prompt may wait for the end of the step.
        """
        self._ask_for_blocks(request)
        start = request.planned_len
        left = request.ready_len - start
        # For fewer tokens, another pass over the weights costs too much.
        if request.has_readers and left > 2 * LAST_CHUNK_TOKENS:
            left -= LAST_CHUNK_TOKENS
        capacity = request.capacity_of(self._pool.tables(request))
        end = min(start + piece_of(left, budget), capacity)
        if start < request.kept_len < end:  # a step can copy the state only at the beginning of a chunk
            end = request.kept_len
        if not self._limits.bidirectional:
            end = request.chunk_end(end, self._limits.whole_media)
        else:  # all tokens see each other, so they wait for the last encoding
            end = request.ready_len if request.ready_len == len(request.token_ids) else start
        length = end - start
        if length <= 0 or end > capacity or (length > budget and not is_first):
            return None
        request.planned_len = end
        samples = end == len(request.token_ids) and request.states == "none"
        return self._launch(request, start, length, follows=False, samples=samples)

    def _launch(self, request: Request, start: int, length: int, follows: bool, samples: bool) -> Chunk:
        copies = self._copy_tail(request, start)
        if samples:
            request.drafts = self._choose_drafts(request)
        self._residents.launch(request, (length if follows else 1) if samples else 0)
        assert request.row is not None
        end, prompt_len, leaves = start + length, request.prompt_len, request.only_first_token
        return Chunk(
            request.key,
            request.row,
            start,
            length,
            follows,
            samples,
            prefills=not follows or leaves or end <= prompt_len,
            hands_over=samples and leaves and not request.has_readers,
            scored=0 if request.sampling.prompt_logprobs is None else max(0, min(end, prompt_len - 1) - start),
            states=_states_of(request, start, end),
            drafts=request.drafts,
            background=request.background,
            copies=copies,
        )

    def _copy_tail(self, request: Request, start: int) -> tuple[tuple[int, int], ...]:
        """Return the copies to make before a chunk from `start`, if it is the first one after `kept_len`.

        If this chunk can make none, no later one can, and the request gives up its spare blocks.
        """
        if not 0 < request.kept_len <= start:
            return ()
        is_there = start == request.kept_len and request.least_len == request.most_len
        copies = self._pool.copy_tail(request) if is_there else ()
        request.kept_len = 0
        if not copies:
            self._emit(SpareUnused(request.key))
        return copies

    def _choose_drafts(self, request: Request) -> int:
        if request.acceptance is None:
            request.acceptance = self._speculation.newcomer()
        return 0 if request.only_first_token else self._speculation.choose(request.acceptance)

    def _ask_for_blocks(self, request: Request) -> None:
        wanted = request.most_len + self._limits.max_drafts
        most = request.limit(self._limits.max_model_len)
        is_short = request.only_first_token or request.states != "none"
        if request.growing or is_short or request.capacity >= min(wanted + LOOKAHEAD_TOKENS, most):
            return
        self._residents.ask_for_blocks(request, min(wanted + GROWTH_TOKENS, most))


def _states_of(request: Request, start: int, end: int) -> int:
    """Return how many of the last tokens of [start, end) leave their hidden states."""
    if request.states == "last":
        return int(end == len(request.token_ids))
    return end - start if request.states == "all" else 0
