"""Computes steps: forms their inputs on the device, runs the model over the paged cache, samples, drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout
from paceline.core.types import Token
from paceline.engine.drafter import Drafter
from paceline.engine.rows import Inputs, Rows
from paceline.engine.sampler import SamplingRow, sample, score
from paceline.engine.scheduler import Limits
from paceline.engine.step import Chunk, ChunkResult, Step, StepResult
from paceline.kernels.interface import LayerCache, view_pool
from paceline.models.base import Model

_SCORED_ROWS = 256
"""Rows of prompt logits at a time: a long prompt times a large vocabulary would not fit into memory."""


class ModelRunner:
    """Runs one model over one pool of KV blocks.

    Args:
        pool: the blocks, flat, of the cache's dtype: [slots * layout.slot_bytes / itemsize]. On CPU this is the arena
            itself, so that what is stored is where others find it.
        drafter: proposes tokens, where there is one. What it keeps of its own comes behind the model's in the layout.
    """

    def __init__(
        self, model: Model, layout: KVLayout, pool: Tensor, limits: Limits, drafter: Drafter | None = None
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._rows = Rows(limits.max_seqs, limits.max_model_len, limits.max_drafts, layout, pool.device)
        self._caches = layer_caches(layout, pool)
        self._device = pool.device

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """One forward pass, and the drafts for the next. When it returns, the KV is in the pool."""
        began = time.perf_counter()
        with _current(self._device):
            self._rows.update(step.updates)
            inputs = self._rows.form(step.chunks)
            hidden = self._model.forward(inputs.token_ids, inputs.positions, self._caches, inputs.batch)
            results = self._sample(hidden, step.chunks, inputs)
            verified = time.perf_counter()
            drafted = self._draft(step.chunks, results)
            if self._device.type == "cuda":
                # A step that samples has waited for the device already; one within a prompt has only launched.
                torch.cuda.current_stream().synchronize()
        ended = time.perf_counter()
        return StepResult(results, ended - began, ended - verified, drafted)

    def _draft(self, chunks: Sequence[Chunk], results: Sequence[ChunkResult]) -> int:
        """Drafts for the step after; returns how many tokens."""
        if self._drafter is None:
            return 0
        rows = self._rows
        self._drafter.observe(rows, chunks)
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
            tokens = self._verify(own, chunk.row, start + span.start - begin + 1)
            results.append(ChunkResult(tokens, max(len(span) - 1, 0), scores))
        return results

    def _verify(self, logits: Tensor, row: int, length: int) -> list[Token]:
        """Accepts drafts as long as they are what would have been sampled; ends with a token that was not drafted.

        Sampling is a function of (logits, seed, position), so that the tokens are those of a run without drafts.

        Args:
            logits: fp32 [1 + drafts, vocab]; the first row chooses the token behind a context of `length` tokens.
        """
        state, fixed = self._rows, self._rows.row(row)
        tokens: list[Token] = []
        ended = False
        for index in range(logits.shape[0]):
            context = state.context(row, length + index)
            token = sample(logits[index], SamplingRow(fixed.sampling, context, fixed.prompt_len))
            tokens.append(token)
            ended = fixed.ends(token.id, length + index + 1)
            if ended or index + 1 == logits.shape[0] or token.id != state.token_ids[row, length + index]:
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


def _current(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the calling thread's own: kernels are launched on that one, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
