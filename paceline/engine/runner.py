"""The runner of steps. It forms the inputs of a step on the device, runs the model over the paged cache, samples
tokens, and drafts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from paceline.core.errors import ConstraintError, ModelError, PacelineError
from paceline.core.kv_layout import KVLayout
from paceline.core.types import Token
from paceline.engine.constraint import Constraints, GrammarError, Grammars, RowProgress
from paceline.engine.drafter import Drafter, NewestStates
from paceline.engine.limits import Limits
from paceline.engine.row_media import EncodingReader
from paceline.engine.row_sampler import ChunkSpan, RowSampler, locate_chunks
from paceline.engine.rows import Inputs, Rows
from paceline.engine.sampler import score
from paceline.engine.step import Chunk, ChunkResult, RowAssigned, Step, StepResult
from paceline.kernels.caches import AnyCache, view_coded_pool, view_pool, view_states
from paceline.kernels.choosing import TokenChooser
from paceline.kernels.codes import CODES
from paceline.kernels.interface import ForwardInputs, Logits, Taps
from paceline.models.adapters.model_adapters import ModelAdapters
from paceline.models.base import Model

_SCORED_ROWS = 256
"""Largest number of rows of prompt logits that are computed together. For a long prompt, all logits would not fit into
memory."""


class ModelRunner:
    """A runner of one model over one pool of KV blocks.

    Args:
        pool: the blocks, flat, of the cache's dtype: [slots * layout.slot_bytes / itemsize]. On a CPU this is usually
            the arena itself, so that other workers find the blocks there.
        drafter: proposes tokens; None without speculation. Its KV groups, if any, follow those of the model.
        probabilistic, chooser: the arguments of `RowSampler`.
        encodings: reads encodings from the host's arena; None if the model reads no encodings.
        adapters: the adapters of the model; None if it takes none.
    """

    def __init__(
        self,
        model: Model,
        layout: KVLayout,
        pool: Tensor,
        limits: Limits,
        grammars: Grammars,
        drafter: Drafter | None = None,
        probabilistic: bool = False,
        chooser: TokenChooser | None = None,
        encodings: EncodingReader | None = None,
        adapters: ModelAdapters | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._drafter = drafter
        sizes = (limits.max_seqs, limits.max_model_len, limits.max_drafts)
        ahead = model.config.whole_media, model.config.bidirectional
        self._rows = Rows(*sizes, layout, pool.device, *ahead, encodings)
        self._constraints = Constraints(limits.max_seqs, grammars)
        self._sampler = RowSampler(self._rows, self._constraints, chooser, probabilistic)
        self._caches = layer_caches(layout, pool)
        self._blocks = pool.view(-1, layout.slot_bytes // layout.itemsize)
        self._gpu = pool.device if pool.is_cuda else None
        self._model_seconds = self._model_cpu_seconds = 0.0

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Compute a step: run the forward pass, sample tokens, and draft for the next step. Afterwards the KV is in the
        pool.
        """
        began, cpu_began = time.perf_counter(), time.thread_time()
        self._model_seconds = self._model_cpu_seconds = 0.0
        with _current(self._gpu):
            self._update(step)
            for chunk in step.chunks:
                for source, target in chunk.copies:
                    self._blocks[target].copy_(self._blocks[source])
            inputs = self._rows.form(step.chunks)
            taps = Taps(self._drafter.taps if self._drafter is not None else ())
            spans = locate_chunks(step.chunks, inputs.starts, inputs.batch.query_start)
            wanted = [len(span.hidden) for span in spans]
            with self._in_model():
                forward = ForwardInputs(inputs.token_ids, inputs.positions, self._caches, inputs.batch, taps=taps)
                hidden = self._model.forward(forward, wanted, inputs.encoded)
            assert taps.broken is not None
            results = self._sample(hidden, spans, inputs, taps.broken)
            verified = time.perf_counter()
            drafted, drafter_lengths = 0, []
            if self._drafter is not None:
                self._drafter.observe(self._rows, step.chunks, inputs, taps.states)
                newest = NewestStates(hidden, _newest(spans, results))
                drafted = self._draft(self._drafter, step.chunks, results, newest)
                if self._drafter.fills_kv:
                    drafter_lengths = [self._rows.drafter_lengths[chunk.row] for chunk in step.chunks]
            self._tell_constraints(step.chunks, results)
            if self._gpu is not None:
                # Sampling has already waited for the device. A step within a prompt has only launched its work, so its
                # end is not known yet.
                torch.cuda.current_stream().synchronize()
        ended, cpu_seconds = time.perf_counter(), time.thread_time() - cpu_began - self._model_cpu_seconds
        return StepResult(
            results, ended - began, self._model_seconds, ended - verified, drafted, drafter_lengths, cpu_seconds
        )

    @contextmanager
    def _in_model(self) -> Iterator[None]:
        began, cpu_began = time.perf_counter(), time.thread_time()
        yield
        self._model_seconds += time.perf_counter() - began
        self._model_cpu_seconds += time.thread_time() - cpu_began

    def _update(self, step: Step) -> None:
        self._rows.update(step.updates)
        for placed in step.adapters:
            assert self._adapters is not None
            self._adapters.place(placed.slot, placed.adapter)
            self._rows.adapters.place(placed)
        for update in step.updates:
            if isinstance(update, RowAssigned):
                output = update.token_ids[update.prompt_len :]
                self._constraints.assign(update.row, update.sampling.constraint, output)

    def _tell_constraints(self, chunks: Sequence[Chunk], results: Sequence[ChunkResult]) -> None:
        """Report new tokens and drafts, so that the next masks are computed while the next forward pass runs."""
        rows = self._rows
        progress = {}
        for chunk, result in zip(chunks, results):
            if result.tokens and self._constraints.has(chunk.row) and not rows.has_ended(chunk.row):
                tokens = [token.id for token in result.tokens]
                progress[chunk.row] = RowProgress(tokens, [draft.token for draft in rows.drafts_of(chunk.row)])
        self._constraints.advance(progress)

    def _draft(
        self, drafter: Drafter, chunks: Sequence[Chunk], results: Sequence[ChunkResult], newest: NewestStates
    ) -> int:
        """Draft tokens for the next step, and return their number."""
        wanted = {
            chunk.row: count
            for chunk, result in zip(chunks, results)
            if result.tokens and (count := min(chunk.drafts, self._rows.room_for_drafts(chunk.row))) > 0
        }
        return drafter.draft(self._rows, wanted, newest) if wanted else 0

    def _sample(
        self, hidden: Tensor, spans: Sequence[ChunkSpan], inputs: Inputs, is_broken: Tensor
    ) -> list[ChunkResult]:
        """Score prompts, and choose a token after each input that may be the newest token of its context.

        Args:
            hidden: [rows, hidden]: see `ChunkSpan.hidden`.
            is_broken: bool [tokens], see `Taps`.
        """
        chosen: dict[int, list[int]] = {}
        logits = hidden
        if count := spans[-1].logits.stop:
            # In most steps these are all rows, and need no copy.
            rows = hidden if count == len(hidden) else hidden[[row for span in spans for row in span.sampled_hidden]]
            is_all = count == len(inputs.token_ids)
            sampled = (
                inputs.token_ids if is_all else inputs.token_ids[[i for span in spans for i in span.sampled_inputs]]
            )
            found = self._logits(rows, [(span.chunk.row, 0, len(span.logits)) for span in spans])
            chosen = self._sampler.choose(found, sampled, spans)
            logits = found.values
        broken: list[bool] = is_broken.tolist()  # a GPU has computed it by now
        return [self._result_of(span, hidden, logits, broken, chosen.get(span.chunk.row)) for span in spans]

    def _result_of(
        self, span: ChunkSpan, hidden: Tensor, logits: Tensor, broken: list[bool], chosen: list[int] | None
    ) -> ChunkResult:
        """Return the result of one chunk.

        Args:
            logits: fp32 [rows, vocab] of all chunks.
            broken: [tokens] of all chunks.
            chosen: see `RowSampler.verify`.
        """
        chunk, count = span.chunk, len(span.inputs)
        scores = self._score(hidden, span)
        own_broken = broken[span.inputs.start : span.inputs.stop]
        sound = own_broken.index(True) if True in own_broken else count
        # A broken token within a prompt leaves a hole in its KV. If it is a draft, the next step decides whether it
        # matters.
        if sound < count and (sound == 0 or not chunk.follows):
            return self._fail(chunk, scores, _nan_error(hidden.dtype))
        if not chunk.samples:
            return ChunkResult(scores=scores, states=_states_of(hidden, span))
        try:
            # No token is drawn from NaN.
            tokens, accepted = self._sampler.verify(logits, span.logits[:sound], chunk.row, span.length, chosen)
        except GrammarError as error:
            return self._fail(chunk, scores, ConstraintError(str(error)))
        return ChunkResult(tokens, max(len(span.logits) - 1, 0), accepted, scores)

    def _fail(self, chunk: Chunk, scores: list[Token], error: PacelineError) -> ChunkResult:
        self._rows.append(chunk.row, [], ended=True)
        return ChunkResult(scores=scores, failure=error)

    def _logits(self, hidden: Tensor, spans: Sequence[tuple[int, int, int]]) -> Logits:
        """Return the logits of states [n, hidden].

        Args:
            spans: (row, start, end) of the states of each row, in their order.
        """
        with self._in_model():
            return self._model.logits(hidden, self._rows.adapters.of(spans))

    def _score(self, hidden: Tensor, span: ChunkSpan) -> list[Token]:
        """Return the prompt tokens after those of a chunk, with their logprobs."""
        chunk, start = span.chunk, span.hidden.start
        tokens: list[Token] = []
        top = self._rows.row(chunk.row).sampling.prompt_logprobs or 0
        for first in range(0, chunk.scored, _SCORED_ROWS):
            end = min(chunk.scored, first + _SCORED_ROWS)
            logits = self._logits(hidden[start + first : start + end], [(chunk.row, first, end)]).values
            position = chunk.start + 1
            targets = self._rows.token_ids[chunk.row, position + first : position + end].tolist()
            tokens += score(logits, targets, top)
        return tokens


def _states_of(hidden: Tensor, span: ChunkSpan) -> Tensor | None:
    """Return the hidden states that are a result of a chunk; None if there are none. They are copied, because a view
    of one row would keep those of the whole step in memory.
    """
    count = span.chunk.states
    return hidden[span.hidden.stop - count : span.hidden.stop].to("cpu", torch.float32, copy=True) if count else None


def _nan_error(dtype: torch.dtype) -> ModelError:
    advice = "" if dtype == torch.float32 else " (--dtype float32 avoids most overflows)"
    return ModelError(
        f"the model computes NaN instead of a token: its weights are damaged, or numbers overflow{advice}"
    )


def _newest(spans: Sequence[ChunkSpan], results: Sequence[ChunkResult]) -> dict[int, int]:
    """Return, for each row, the index of the hidden state from which its newest token was chosen."""
    return {
        span.chunk.row: span.hidden[len(result.tokens) - 1 if span.chunk.follows else -1]
        for span, result in zip(spans, results)
        if result.tokens
    }


def layer_caches(layout: KVLayout, pool: Tensor) -> list[AnyCache]:
    """Return the cache of each layer, in the model's order. A layer without a cache of its own gets the cache that it
    reads.
    """
    by_layer: dict[int, AnyCache] = {}
    for group in layout.groups:
        shape, layers = group.shape, len(group.shape.layers)
        views: Sequence[AnyCache]
        if shape.state:
            views = view_states(pool, layout.slot_bytes, layers, shape.state)
        elif shape.code:
            of_block = shape.kv_heads, group.block_tokens, shape.head_dim
            views = view_coded_pool(pool, layout.slot_bytes, layers, *of_block, CODES[shape.code])
        else:
            slot_elements = layout.slot_bytes // layout.itemsize
            sizes = (shape.kv_heads, group.block_tokens, shape.head_dim, shape.planes)
            views = view_pool(pool, slot_elements, layers, *sizes)
        by_layer.update(zip(shape.layers, views))
        by_layer.update({layer: by_layer[source] for layer, source in shape.readers})
    return [by_layer[layer] for layer in sorted(by_layer)]


def _current(gpu: torch.device | None) -> AbstractContextManager[None]:
    """Select the GPU of the calling thread. Kernels are launched on this GPU, wherever their tensors are."""
    return nullcontext() if gpu is None else torch.cuda.device(gpu)
