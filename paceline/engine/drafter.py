"""Drafters propose the next tokens of each row, so that one forward pass of the target model can verify several
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from torch import Tensor

from paceline.core.media import MediaSpan
from paceline.engine.rows import Inputs, Rows
from paceline.engine.sampler import Draft, propose
from paceline.engine.step import Chunk
from paceline.kernels.caches import AnyCache
from paceline.kernels.choosing import TokenChooser
from paceline.kernels.interface import ForwardInputs, Taps
from paceline.models.base import PADDING, EncodedRows, Model
from paceline.models.model_config import ModelConfig

_CATCH_UP_TOKENS = 128


class Drafter(Protocol):
    """A source of draft tokens. A wrong draft costs time, but does not change the output."""

    fills_kv: bool
    """Whether the drafter has KV groups of its own."""
    taps: tuple[int, ...]
    """Depths of the target model whose hidden states the drafter reads (trained heads, EAGLE); see `Taps`."""

    def observe(self, rows: Rows, chunks: Sequence[Chunk], inputs: Inputs, states: Mapping[int, Tensor]) -> None:
        """Note a step that the target model has computed. The rows already include the tokens that the step has chosen.

        Args:
            states: hidden states [tokens, hidden] of the tokens of `inputs`, for each depth in `taps`.
        """

    def draft(self, rows: Rows, wanted: Mapping[int, int], newest: NewestStates) -> int:
        """Propose up to `wanted[row]` (at least 1) tokens to follow each row's context, and put them there with
        `Rows.draft`.

        Return the number of drafted tokens; 0 if the time of this call must not count as the cost of drafts.
        """


@dataclass(frozen=True, slots=True)
class NewestStates:
    """For each row, the target's hidden state from which the newest token was chosen."""

    hidden: Tensor
    """[n, hidden], after the final norm."""
    places: Mapping[int, int]
    """For each row of the device's state, the index of its hidden state in `hidden`."""

    def of(self, rows: Sequence[int]) -> Tensor:
        """Return the states of these rows, [rows, hidden], as a copy."""
        return self.hidden[[self.places[row] for row in rows]]


class PromptLookup:
    """Drafts by prompt lookup (n-gram): finds an earlier occurrence of the context's last tokens, and drafts the tokens
    after it.

    Args:
        min_tokens: shortest match with the end of the context, in tokens.
        max_tokens: longest match, in tokens. The longest match wins; of several longest matches, the latest.
    """

    fills_kv = False
    taps: tuple[int, ...] = ()

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens

    def observe(self, rows: Rows, chunks: Sequence[Chunk], inputs: Inputs, states: Mapping[int, Tensor]) -> None:
        pass

    def draft(self, rows: Rows, wanted: Mapping[int, int], newest: NewestStates) -> int:
        for row, count in wanted.items():
            rows.draft(row, [Draft(token) for token in self.lookup(rows.context(row), count, rows.media.spans[row])])
        return sum(rows.drafts[row] for row in wanted)

    def lookup(self, context: np.ndarray, count: int, media: Sequence[MediaSpan] = ()) -> list[int]:
        """Return up to `count` token ids that may follow a context int32 [tokens]; an empty list without a match.

        Args:
            media: spans of the context. Their tokens are never drafted.
        """
        last = len(context) - 1
        # Begin with all earlier places of the last token, and keep only the places where more and more tokens match.
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
        end = min((max(begin, span.start) for span in media if span.end > begin), default=len(context))
        return [int(token) for token in context[begin : min(begin + count, end)]]


def draft_next(
    rows: Rows, row: int, end: int, logits: Tensor, draws: bool, chooser: TokenChooser | None
) -> tuple[Draft, bool]:
    """Draft a token to follow the first `end` tokens of a row, earlier drafts included, and add it to the row's drafts.

    Args:
        logits: fp32 [vocab] after these tokens; overwritten.
        draws, chooser: the arguments of `sampler.propose`.

    Returns:
        The draft, and whether it would be the row's last token.
    """
    fixed = rows.row(row)
    draft = propose(logits, rows.sampling_row(row, end, fixed.allowed), draws, chooser)
    rows.token_ids[row, end] = draft.token
    return draft, fixed.ends(draft.token, end + 1)


class ModelDrafter:
    """A model that drafts: a smaller one with KV groups of its own, or the target's first layers with its head.

    Args:
        draws: the argument of `sampler.propose`.
        first_group: index of the model's first group in the layout.
        layers: number of the target's first layers, which share its KV; None runs all layers of a smaller model.
        chooser: the kernels' chooser of tokens, if they have one.
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
        """Compute the draft model's KV of the prompts in a step. `draft` computes its KV of later tokens."""
        # A request that is handed over takes this KV along to its decode worker. It never drafts here.
        prompts = [chunk for chunk in chunks if chunk.prefills]
        if prompts and self.fills_kv:
            self._catch_up(rows, {chunk.row: chunk.end for chunk in prompts})

    def draft(self, rows: Rows, wanted: Mapping[int, int], newest: NewestStates) -> int:
        wanted = {row: count for row, count in wanted.items() if not rows.undraftable[row]}
        late = {}
        if self.fills_kv:
            # A row that had no drafts for a while lacks the KV of many tokens. It catches up over several steps,
            # because other rows wait.
            ends = {row: rows.drafter_lengths[row] + _CATCH_UP_TOKENS for row in wanted}
            late = {row: end for row, end in ends.items() if end < rows.lengths[row]}
            self._catch_up(rows, late)
        left = {row: count for row, count in wanted.items() if row not in late}
        # The target's own layers have the KV of all tokens but the newest.
        starts = {row: rows.drafter_lengths[row] if self.fills_kv else rows.lengths[row] - 1 for row in left}
        drafts: dict[int, list[Draft]] = {row: [] for row in left}
        while left:
            order = list(left)
            ends = {row: rows.lengths[row] + len(drafts[row]) for row in order}
            inputs = rows.span([(row, starts[row], ends[row]) for row in order], comes_again=not self.fills_kv)
            hidden, broken = self._forward(inputs, wanted_of_each=1)
            logits = self._model.logits(hidden).values
            for index, (row, end) in enumerate(ends.items()):
                if broken[index]:
                    rows.undraftable[row] = True
                    del left[row]
                    continue
                draft, ends_row = draft_next(rows, row, end, logits[index], self._draws, self._chooser)
                drafts[row].append(draft)
                starts[row] = end
                if len(drafts[row]) == wanted[row] or ends_row:
                    del left[row]
        for row, proposed in drafts.items():
            rows.draft(row, proposed)
            rows.drafter_lengths[row] = starts[row]
        return 0 if late else sum(map(len, drafts.values()))

    def _catch_up(self, rows: Rows, ends: Mapping[int, int]) -> None:
        """Compute the draft model's KV of the tokens before ends[row]."""
        spans = [(row, rows.drafter_lengths[row], end) for row, end in ends.items() if not rows.undraftable[row]]
        if spans:
            _, broken = self._forward(rows.span(spans), wanted_of_each=0)
            for (row, _, end), is_broken in zip(spans, broken):
                rows.undraftable[row] = is_broken
                if not is_broken:  # otherwise their tokens do not count as computed, so the blocks stay unsealed
                    rows.drafter_lengths[row] = end

    def _forward(self, inputs: Inputs, wanted_of_each: int) -> tuple[Tensor, list[bool]]:
        """Return the hidden states of the last `wanted_of_each` tokens of each row, and for each row whether a token is
        broken.
        """
        batch = inputs.batch.from_group(self._first_group)
        wanted = (wanted_of_each,) * len(batch.context_len)
        token_ids, encoded = inputs.token_ids, inputs.encoded
        if encoded is not None and not self._reads(encoded):
            # Without encodings, drafts are worse, but no token changes.
            token_ids, encoded = token_ids.index_fill(0, encoded.places, PADDING), None
        taps = Taps()
        forward = ForwardInputs(token_ids, inputs.positions, self._caches, batch, self._layers, taps)
        hidden = self._model.forward(forward, wanted, encoded)
        assert taps.broken is not None
        broken = taps.broken.tolist()
        return hidden, [any(broken[begin:end]) for begin, end in pairwise(batch.query_start)]

    def _reads(self, encoded: EncodedRows) -> bool:
        """Return whether the draft model can read encodings that were made for its target."""
        config = self._model.config
        return isinstance(config, ModelConfig) and config.encoding_size == encoded.values.shape[1]
