"""The runner of steps. It forms their inputs on the device, runs the model over the paged cache, samples and drafts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout
from paceline.core.types import Token
from paceline.engine.constraint import Constraints, GrammarError, Grammars, RowProgress
from paceline.engine.drafter import Drafter, NewestStates
from paceline.engine.limits import Limits
from paceline.engine.row_media import EncodingReader
from paceline.engine.rows import Inputs, Rows
from paceline.engine.sampler import SamplingRow, as_draw, best_of, sample, score
from paceline.engine.step import Chunk, ChunkResult, RowAssigned, Step, StepResult
from paceline.kernels.caches import AnyCache, view_pool, view_states
from paceline.kernels.choosing import Draw, TokenChooser
from paceline.kernels.interface import Logits, Taps
from paceline.models.base import Model

_SCORED_ROWS = 256
"""Most rows of prompt logits that are computed together. For a long prompt, all logits would not fit into memory."""


class ModelRunner:
    """A runner of one model over one pool of KV blocks.

    Args:
        pool: the blocks, flat, of the cache's dtype: [slots * layout.slot_bytes / itemsize]. On a CPU this is usually
            the arena itself, so that other workers find the blocks there.
        drafter: proposes tokens, if there is one. If it has KV groups, they come after the model's in the layout.
        probabilistic: accept drafts as often as the distribution allows, by random numbers of their own. Otherwise,
            accept only the tokens that would have been sampled without drafts, so that outputs are the same.
        chooser: chooses tokens of all rows in one call, if they depend on logits alone.
        encodings: reads encodings from the host's arena; None if the model reads none.
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
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._probabilistic = probabilistic
        self._chooser = chooser
        sizes = (limits.max_seqs, limits.max_model_len, limits.max_drafts)
        self._rows = Rows(*sizes, layout, pool.device, model.config.whole_media, encodings)
        self._constraints = Constraints(limits.max_seqs, grammars)
        self._caches = layer_caches(layout, pool)
        self._gpu = pool.device if pool.is_cuda else None
        self._model_seconds = self._model_cpu_seconds = 0.0

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Compute a forward pass, sample, and draft for the next step. When it returns, the KV is in the pool."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        self._model_seconds = self._model_cpu_seconds = 0.0
        with _current(self._gpu):
            self._update(step)
            inputs = self._rows.form(step.chunks)
            taps = Taps(self._drafter.taps if self._drafter is not None else ())
            wanted = _wanted(step.chunks, inputs)
            with self._in_model():
                own = (inputs.token_ids, inputs.positions, self._caches, inputs.batch)
                hidden = self._model.forward(*own, taps=taps, wanted=wanted, encoded=inputs.encoded)
            results = self._sample(hidden, step.chunks, inputs, wanted)
            verified = time.perf_counter()
            drafted, drafter_lengths = 0, []
            if self._drafter is not None:
                self._drafter.observe(self._rows, step.chunks, inputs, taps.states)
                drafted = self._draft(
                    self._drafter, step.chunks, results, NewestStates(hidden, _newest(step.chunks, results, wanted))
                )
                if self._drafter.fills_kv:
                    drafter_lengths = [self._rows.drafter_lengths[chunk.row] for chunk in step.chunks]
            self._tell_constraints(step.chunks, results)
            if self._gpu is not None:
                # A step that samples has waited for the device already. A step within a prompt has only launched work.
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
        self, hidden: Tensor, chunks: Sequence[Chunk], inputs: Inputs, wanted: Sequence[int]
    ) -> list[ChunkResult]:
        """Score prompts, and choose a token after each input that may be the newest token of its context.

        Args:
            hidden: [sum(wanted), hidden]: of the last wanted[i] tokens of each chunk.
        """
        spans = list(pairwise(inputs.batch.query_start))
        chosen_at = [range(end - 1 if not chunk.follows else begin, end) for chunk, (begin, end) in zip(chunks, spans)]
        lengths = [start + span.start - begin + 1 for start, span, (begin, _) in zip(inputs.starts, chosen_at, spans)]
        # What to add to a token's row among the inputs for its row in `hidden`.
        shifts = [own_end - end for own_end, (_, end) in zip(accumulate(wanted), spans)]
        places = [
            (index, index + shift)
            for chunk, span, shift in zip(chunks, chosen_at, shifts)
            if chunk.samples
            for index in span
        ]
        chosen: dict[int, list[int]] = {}
        rows = hidden
        if places:
            # In most steps these are all rows, and need no copy.
            own = hidden if len(places) == len(hidden) else hidden[[row for _, row in places]]
            is_all = len(places) == len(inputs.token_ids)
            token_ids = inputs.token_ids if is_all else inputs.token_ids[[index for index, _ in places]]
            logits = self._logits(own)
            chosen = self._choose(logits, token_ids, chunks, lengths, [len(span) for span in chosen_at])
            rows = logits.values
        results, first = [], 0
        for chunk, span, (begin, _), shift, length in zip(chunks, chosen_at, spans, shifts, lengths):
            scores = self._score(hidden, chunk, begin + shift)
            if not chunk.samples:
                results.append(ChunkResult(scores=scores))
                continue
            drawn = range(first, first + len(span))
            first = drawn.stop
            try:
                tokens, accepted = self._verify(rows, drawn, chunk.row, length, chosen.get(chunk.row))
            except GrammarError as error:
                self._rows.append(chunk.row, [], ended=True)
                results.append(ChunkResult(scores=scores, failure=str(error)))
                continue
            results.append(ChunkResult(tokens, max(len(span) - 1, 0), accepted, scores))
        return results

    def _choose(
        self,
        logits: Logits,
        inputs: Tensor,
        chunks: Sequence[Chunk],
        lengths: Sequence[int],
        counts: Sequence[int],
    ) -> dict[int, list[int]]:
        """Choose tokens for the rows in which logits alone decide, all in one call.

        Args:
            logits: of all chunks that sample, `counts[i]` rows for each.
            inputs: int64 [rows]: the input token of each row of logits.
            lengths: [chunks]: tokens of the context after which the first row of logits chooses.

        Returns:
            For each of these rows of the device's state, the accepted drafts and the token after them.
        """
        best = self._best(logits, chunks)
        chosen: dict[int, list[int]] = {}
        draws: list[Draw] = []
        drawing: list[int] = []
        places: list[int] = []
        first_draws, first = [0], 0
        for chunk, length, count in zip(chunks, lengths, counts):
            if not chunk.samples:
                continue
            if best is not None and self._rows.row(chunk.row).takes_best:
                chosen[chunk.row] = best[first : first + count]
            elif self._chooser is not None and (own := self._draws(chunk.row, length, count)):
                draws += own
                drawing.append(chunk.row)
                places += range(first, first + count)
                first_draws.append(len(draws))
            first += count
        if self._chooser is not None and draws:
            tokens = self._chooser.choose(logits.values, places, draws)
            if len(draws) > len(drawing):
                drafts = inputs[places] if len(places) < len(inputs) else inputs
                accepted = self._chooser.accept(tokens, drafts, first_draws).tolist()
                chosen |= {row: [token for token in own if token >= 0] for row, own in zip(drawing, accepted)}
            else:
                chosen |= {row: [token] for row, token in zip(drawing, tokens.tolist())}
        return chosen

    def _best(self, logits: Logits, chunks: Sequence[Chunk]) -> list[int] | None:
        """Return the best token of each row of logits; None if no chunk needs it, or if the chooser will find it."""
        if logits.best is not None:
            best: list[int] = logits.best.tolist()
            return best
        if self._chooser is None and any(chunk.samples and self._rows.row(chunk.row).takes_best for chunk in chunks):
            return best_of(logits.values)
        return None

    def _draws(self, row: int, length: int, count: int) -> list[Draw]:
        """Return how a row chooses its next `count` tokens, the first after a context of `length` tokens.

        The list is empty if the choice depends on more than logits.
        """
        fixed = self._rows.row(row)
        draws = [as_draw(fixed.sampling, length + index, fixed.prompt_len) for index in range(count)]
        known = [draw for draw in draws if draw is not None]
        # Drafts that were drawn at random are also accepted at random.
        by_chance = self._probabilistic and count > 1 and any(draw.temperature for draw in known)
        return known if len(known) == count and not by_chance else []

    def _logits(self, hidden: Tensor) -> Logits:
        with self._in_model():
            return self._model.logits(hidden)

    def _verify(
        self, logits: Tensor, own: range, row: int, length: int, chosen: Sequence[int] | None
    ) -> tuple[list[Token], int]:
        """Sample tokens until one differs from its draft. Return the tokens, and how many of them are drafts.

        A draft that the grammar forbids is never sampled, so no mask is needed after it. If the grammar allows a draft
        but no token after it, there is no mask after it either; then the next step raises GrammarError.

        Args:
            logits: fp32 [rows, vocab] of all chunks of the step.
            own: rows of logits of this chunk, 1 + drafts. The first one chooses the token after `length` tokens.
            chosen: the accepted drafts and the token after them, if `_choose` has chosen them; None to sample here.

        Raises:
            GrammarError: the row has a grammar, and it allows no token.
        """
        state, fixed = self._rows, self._rows.row(row)
        if not own:
            return [], 0
        tokens: list[Token] = []
        masks, drafts = self._constraints.masks(row), state.drafts_of(row)
        for index in range(len(own) if masks is None else min(len(masks), len(own))):
            draft = drafts[index] if index + 1 < len(own) else None
            if chosen is not None:
                token = Token(chosen[index])
            else:
                mask = masks[index] if masks is not None else None
                how = SamplingRow(fixed.sampling, state.context(row, length + index), fixed.prompt_len, mask)
                token = sample(logits[own[index]], how, draft if self._probabilistic else None, self._chooser)
            tokens.append(token)
            is_draft = draft is not None and token.id == draft.token
            ended = fixed.ends(token.id, length + len(tokens))
            if ended or not is_draft:
                break
        state.append(row, [token.id for token in tokens], ended)
        return tokens, len(tokens) - (not is_draft)

    def _score(self, hidden: Tensor, chunk: Chunk, start: int) -> list[Token]:
        tokens: list[Token] = []
        top = self._rows.row(chunk.row).sampling.prompt_logprobs or 0
        for first in range(0, chunk.scored, _SCORED_ROWS):
            end = min(chunk.scored, first + _SCORED_ROWS)
            logits = self._logits(hidden[start + first : start + end]).values
            position = chunk.start + 1
            targets = self._rows.token_ids[chunk.row, position + first : position + end].tolist()
            tokens += score(logits, targets, top)
        return tokens


def _wanted(chunks: Sequence[Chunk], inputs: Inputs) -> list[int]:
    """Return how many of each chunk's last tokens need logits."""
    return [
        end - begin if chunk.scored or (chunk.samples and chunk.follows) else int(chunk.samples)
        for chunk, (begin, end) in zip(chunks, pairwise(inputs.batch.query_start))
    ]


def _newest(chunks: Sequence[Chunk], results: Sequence[ChunkResult], wanted: Sequence[int]) -> dict[int, int]:
    """Return the index of each row's hidden state from which its newest token was chosen, among the wanted ones."""
    ends = list(accumulate(wanted))
    return {
        chunk.row: (end - count + len(result.tokens) if chunk.follows else end) - 1
        for chunk, result, end, count in zip(chunks, results, ends, wanted)
        if result.tokens
    }


def layer_caches(layout: KVLayout, pool: Tensor) -> list[AnyCache]:
    """Return the cache of each layer, in the model's order. A layer without its own has the cache that it reads."""
    by_layer: dict[int, AnyCache] = {}
    for group in layout.groups:
        shape, layers = group.shape, len(group.shape.layers)
        views: Sequence[AnyCache]
        if shape.state:
            views = view_states(pool, layout.slot_bytes, layers, shape.state)
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
