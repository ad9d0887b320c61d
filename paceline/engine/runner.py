"""Computes steps: forms their inputs on the device, runs the model over the paged cache, samples, drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout
from paceline.core.types import Token
from paceline.engine.constraint import Constraints, GrammarError, Move
from paceline.engine.drafter import Drafter
from paceline.engine.rows import Inputs, Rows
from paceline.engine.sampler import SamplingRow, sample, score
from paceline.engine.scheduler import Limits
from paceline.engine.step import Chunk, ChunkResult, Joined, Step, StepResult
from paceline.kernels.interface import LayerCache, view_pool
from paceline.models.base import Model, Taps

_SCORED_ROWS = 256
"""Rows of prompt logits at a time: a long prompt times a large vocabulary would not fit into memory."""


class ModelRunner:
    """Runs one model over one pool of KV blocks.

    Args:
        pool: the blocks, flat, of the cache's dtype: [slots * layout.slot_bytes / itemsize]. On CPU this is the arena
            itself, so that what is stored is where others find it.
        drafter: proposes tokens, where there is one. What it keeps of its own comes behind the model's in the layout.
        probabilistic: accept drafts as often as the distribution allows, by numbers of their own; otherwise just when
            they are what would have been sampled without drafts: the same distribution, and the same tokens.
    """

    def __init__(
        self,
        model: Model,
        layout: KVLayout,
        pool: Tensor,
        limits: Limits,
        drafter: Drafter | None = None,
        probabilistic: bool = False,
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._probabilistic = probabilistic
        self._rows = Rows(limits.max_seqs, limits.max_model_len, limits.max_drafts, layout, pool.device)
        self._constraints = Constraints(limits.max_seqs)
        self._caches = layer_caches(layout, pool)

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """One forward pass, and the drafts for the next."""
        began = time.perf_counter()
        self._update(step)
        inputs = self._rows.form(step.chunks)
        taps = Taps(self._drafter.taps if self._drafter is not None else ())
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._caches, inputs.batch, taps=taps)
        results = self._sample(hidden, step.chunks, inputs)
        verified = time.perf_counter()
        drafted = self._draft(step.chunks, results, inputs, taps)
        self._tell_constraints(step.chunks, results)
        ended = time.perf_counter()
        return StepResult(results, ended - began, ended - verified, drafted)

    def _update(self, step: Step) -> None:
        self._rows.update(step.updates)
        for update in step.updates:
            if isinstance(update, Joined):
                self._constraints.join(update.row, update.matcher, update.token_ids[update.prompt_len :])

    def _tell_constraints(self, chunks: Sequence[Chunk], results: Sequence[ChunkResult]) -> None:
        """Masks for what comes next are worked out while the next forward pass runs."""
        rows = self._rows
        moves = {}
        for chunk, result in zip(chunks, results):
            if result.tokens and not rows.has_ended(chunk.row):
                tokens = [token.id for token in result.tokens]
                moves[chunk.row] = Move(tokens, [draft.token for draft in rows.drafts_of(chunk.row)])
        self._constraints.advance(moves)

    def _draft(self, chunks: Sequence[Chunk], results: Sequence[ChunkResult], inputs: Inputs, taps: Taps) -> int:
        """Drafts for the step after; returns how many tokens."""
        if self._drafter is None:
            return 0
        rows = self._rows
        self._drafter.observe(rows, chunks, inputs, taps.states)
        wanted = {chunk.row: chunk.drafts for chunk, result in zip(chunks, results) if result.tokens}
        wanted = {row: min(count, rows.room_for_drafts(row)) for row, count in wanted.items()}
        wanted = {row: count for row, count in wanted.items() if count > 0}
        self._drafter.draft(rows, wanted)
        return int(rows.drafts[list(wanted)].sum())

    def _sample(self, hidden: Tensor, chunks: Sequence[Chunk], inputs: Inputs) -> list[ChunkResult]:
        """Scores prompts, and chooses tokens behind every input that may be the newest of its context."""
        spans = list(zip(inputs.batch.query_start, inputs.batch.query_start[1:]))
        chosen_at = [range(end - 1 if not chunk.follows else begin, end) for chunk, (begin, end) in zip(chunks, spans)]
        wanted = [index for chunk, span in zip(chunks, chosen_at) if chunk.samples for index in span]
        logits = self._model.logits(hidden[wanted]) if wanted else hidden
        results, first = [], 0
        for chunk, span, (begin, _), start in zip(chunks, chosen_at, spans, inputs.starts):
            scores = self._score(hidden, chunk, begin)
            if not chunk.samples:
                results.append(ChunkResult(scores=scores))
                continue
            own = logits[first : first + len(span)]
            first += len(span)
            try:
                tokens = self._verify(own, chunk.row, start + span.start - begin + 1)
            except GrammarError as error:
                self._rows.append(chunk.row, [], ended=True)
                results.append(ChunkResult(scores=scores, failure=str(error)))
                continue
            results.append(ChunkResult(tokens, max(len(span) - 1, 0), scores))
        return results

    def _verify(self, logits: Tensor, row: int, length: int) -> list[Token]:
        """Accepts drafts as long as they are what is sampled; ends with a token that was not drafted.

        Drafts that a grammar forbids are never sampled, so that behind them no mask is needed.

        Args:
            logits: fp32 [1 + drafts, vocab]; the first row chooses the token behind a context of `length` tokens.

        Raises:
            GrammarError: the row has a grammar, and it allows no token.
        """
        state, fixed = self._rows, self._rows.row(row)
        tokens: list[Token] = []
        ended = False
        masks = self._constraints.masks(row) if logits.shape[0] > 0 else None
        drafts = state.drafts_of(row)
        for index in range(logits.shape[0]):
            mask = masks[index] if masks is not None else None
            context = state.context(row, length + index)
            draft = drafts[index] if index + 1 < logits.shape[0] else None
            own = SamplingRow(fixed.sampling, context, fixed.prompt_len, mask)
            token = sample(logits[index], own, draft if self._probabilistic else None)
            tokens.append(token)
            ended = fixed.ends(token.id, length + index + 1)
            if ended or draft is None or token.id != draft.token:
                break
        if tokens:
            state.append(row, [token.id for token in tokens], ended)
        return tokens

    def _score(self, hidden: Tensor, chunk: Chunk, start: int) -> list[Token]:
        tokens: list[Token] = []
        for first in range(0, len(chunk.scored), _SCORED_ROWS):
            positions = chunk.scored[first : first + _SCORED_ROWS]
            logits = self._model.logits(hidden[start + first : start + first + len(positions)])
            targets = self._rows.token_ids[chunk.row, positions.start : positions.stop].tolist()
            tokens += score(logits, targets, chunk.request.sampling.prompt_logprobs or 0)
        return tokens


def layer_caches(layout: KVLayout, pool: Tensor) -> list[LayerCache]:
    """One cache a layer of the model, in the model's order."""
    by_layer: dict[int, LayerCache] = {}
    for group in layout.groups:
        shape = group.shape
        slot_elements = layout.slot_bytes // layout.itemsize
        views = view_pool(pool, slot_elements, len(shape.layers), shape.kv_heads, group.block_tokens, shape.head_dim)
        by_layer.update(zip(shape.layers, views))
    return [by_layer[layer] for layer in sorted(by_layer)]
