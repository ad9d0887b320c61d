"""Guessing the next tokens, so that one forward pass can verify several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from paceline.engine.rows import Inputs, Rows
from paceline.engine.sampler import Draft, SamplingRow, propose
from paceline.engine.step import Chunk
from paceline.kernels.interface import AnyCache, TokenChooser
from paceline.models.base import Model

_CATCH_UP_TOKENS = 128


class Drafter(Protocol):
    """Proposes what may come next. A wrong guess costs time, never a token."""

    fills_kv: bool
    """Whether it has KV groups of its own."""
    taps: tuple[int, ...]
    """Depths of the target model whose hidden states it wants to see (trained heads, EAGLE); see `Taps`."""

    def observe(self, rows: Rows, chunks: Sequence[Chunk], inputs: Inputs, states: Mapping[int, Tensor]) -> None:
        """Sees what the target model has computed in a step; the tokens that were chosen are in the rows.

        Args:
            states: [tokens, hidden] of every depth in `taps`, for the tokens of `inputs`.
        """

    def draft(self, rows: Rows, wanted: Mapping[int, int]) -> int:
        """Puts up to wanted[row] tokens, at least one, behind the context of each row, with `Rows.draft`.

        Returns how many tokens it drafted; 0 where the time that it took says nothing about what a draft costs.
        """


class PromptLookup:
    """What followed the last time that the context ended like this (n-gram, prompt lookup).

    Args:
        min_tokens, max_tokens: how much of the end must agree, and how much is looked at to choose the best place.
    """

    fills_kv = False
    taps: tuple[int, ...] = ()

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens

    def observe(self, rows: Rows, chunks: Sequence[Chunk], inputs: Inputs, states: Mapping[int, Tensor]) -> None:
        pass

    def draft(self, rows: Rows, wanted: Mapping[int, int]) -> int:
        for row, count in wanted.items():
            rows.draft(row, [Draft(token) for token in self.lookup(rows.context(row), count)])
        return sum(rows.drafts[row] for row in wanted)

    def lookup(self, context: np.ndarray, count: int) -> list[int]:
        """Up to `count` token ids that may follow int32 [tokens]; none where there is no idea."""
        last = len(context) - 1
        # Places before the end where the last token stands, narrowed to those where more and more of the end agrees.
        places = np.flatnonzero(context[:last] == context[last])
        for agreed in range(1, self._max_tokens):
            longer = places[(places >= agreed) & (context[places - agreed] == context[last - agreed])]
            if len(longer) == 0:
                if agreed < self._min_tokens:
                    return []
                break
            places = longer
        if len(places) == 0:
            return []
        begin = int(places[-1]) + 1
        return [int(token) for token in context[begin : begin + count]]


class ModelDrafter:
    """A model that drafts: a smaller one with KV groups of its own, or the target's first layers with its head.

    Args:
        draws: see `sampler.propose`.
        layers: how many layers run; None is all. The target's own first layers share its KV.
        first_group: index of the model's first group in the layout.
        chooser: the kernels' own, if they have one.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        model: Model,
        caches: Sequence[AnyCache],
        draws: bool = False,
        first_group: int = 0,
        layers: int | None = None,
        chooser: TokenChooser | None = None,
    ) -> None:
        self._model = model
        self._caches = caches
        self._draws = draws
        self._first_group = first_group
        self._layers = layers
        self._chooser = chooser
        self.fills_kv = layers is None

    def observe(self, rows: Rows, chunks: Sequence[Chunk], inputs: Inputs, states: Mapping[int, Tensor]) -> None:
        """Computes its own KV of prompts; of the tokens behind them it computes it when it drafts."""
        # A request that leaves after its first token takes the drafter's KV along, and never drafts here.
        prompts = [chunk for chunk in chunks if chunk.prefills]
        if prompts and self.fills_kv:
            self._catch_up(rows, {chunk.row: chunk.end for chunk in prompts})

    def draft(self, rows: Rows, wanted: Mapping[int, int]) -> int:
        late = {}
        if self.fills_kv:
            # Nothing may have been drafted for long. Not all of it in one step: others wait for its end.
            ends = {row: rows.drafter_lengths[row] + _CATCH_UP_TOKENS for row in wanted}
            late = {row: end for row, end in ends.items() if end < rows.lengths[row]}
            self._catch_up(rows, late)
        left = {row: count for row, count in wanted.items() if row not in late}
        # Of the target's own layers all is computed but the newest token.
        starts = {row: rows.drafter_lengths[row] if self.fills_kv else rows.lengths[row] - 1 for row in left}
        drafts: dict[int, list[Draft]] = {row: [] for row in left}
        while left:
            order = list(left)
            ends = {row: rows.lengths[row] + len(drafts[row]) for row in order}
            inputs = rows.span([(row, starts[row], ends[row]) for row in order])
            hidden = self._forward(inputs)
            logits = self._model.logits(hidden[[end - 1 for end in inputs.batch.query_start[1:]]]).values
            for index, (row, end) in enumerate(ends.items()):
                fixed = rows.row(row)
                context = SamplingRow(fixed.sampling, rows.context(row, end), fixed.prompt_len)
                draft = propose(logits[index], context, self._draws, self._chooser)
                drafts[row].append(draft)
                rows.token_ids[row, end] = draft.token
                starts[row] = end
                if len(drafts[row]) == wanted[row] or fixed.ends(draft.token, end + 1):
                    del left[row]
        for row, proposed in drafts.items():
            rows.draft(row, proposed)
            rows.drafter_lengths[row] = starts[row]
        return 0 if late else sum(map(len, drafts.values()))

    def _catch_up(self, rows: Rows, ends: Mapping[int, int]) -> None:
        """Computes its own KV of tokens before ends[row]."""
        if ends:
            self._forward(rows.span([(row, rows.drafter_lengths[row], end) for row, end in ends.items()]))
            for row, end in ends.items():
                rows.drafter_lengths[row] = end

    def _forward(self, inputs: Inputs) -> Tensor:
        batch = inputs.batch.from_group(self._first_group)
        return self._model.forward(inputs.token_ids, inputs.positions, self._caches, batch, self._layers)
