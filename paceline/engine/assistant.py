"""Drafting by an assistant: a small model that reads the keys, values and hidden states of its target model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.engine.drafter import NewestStates, draft_next
from paceline.engine.rows import Inputs, Rows
from paceline.engine.sampler import Draft
from paceline.engine.step import Chunk
from paceline.kernels.batch import AttentionBatch
from paceline.kernels.caches import AnyCache
from paceline.kernels.choosing import TokenChooser
from paceline.kernels.interface import is_broken
from paceline.kernels.transfer import to_device
from paceline.models.compiled import CompiledModel
from paceline.models.gemma4_assistant import Gemma4Assistant


class AssistantDrafter:
    """Drafts tokens with an assistant model. Keeps no state from one step to the next.

    The target's hidden state for the first draft is always there, because a row gets drafts only after a step that has
    computed the token before the row's newest token. This also holds after a handoff, a swap or a preemption.

    All drafts of a row have the position of the newest token, as in `transformers`. They see the keys that the newest
    token will see, but not the key of the newest token itself, which is not computed yet. So they read no block that
    may have been trimmed already.

    Args:
        caches: the caches of the target's layers.
        draws, chooser: the arguments of `sampler.propose`.
    """

    fills_kv = False
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        assistant: Gemma4Assistant,
        target: CompiledModel,
        caches: Sequence[AnyCache],
        draws: bool = False,
        chooser: TokenChooser | None = None,
    ) -> None:
        storing = [layer for layer in range(target.config.num_layers) if layer not in target.config.kv_sources]
        last = {target.config.layer_types[layer]: layer for layer in storing}
        self._groups = [target.layer_groups[last[kind]] for kind in assistant.kinds]
        self._caches = [caches[last[kind]] for kind in assistant.kinds]
        self._assistant = assistant
        self._embed = target.embed
        self._draws = draws
        self._chooser = chooser

    def observe(self, rows: Rows, chunks: Sequence[Chunk], inputs: Inputs, states: Mapping[int, Tensor]) -> None:
        pass

    def draft(self, rows: Rows, wanted: Mapping[int, int], newest: NewestStates) -> int:
        drafts: dict[int, list[Draft]] = {row: [] for row in wanted}
        left = list(wanted)
        states = newest.of(left)
        while left:
            ends = [rows.lengths[row] + len(drafts[row]) for row in left]
            hidden = self._forward(rows, left, ends, states)
            logits, broken = self._assistant.logits(hidden).values, is_broken(hidden).tolist()
            kept = []
            for index, (row, end) in enumerate(zip(left, ends)):
                if broken[index]:
                    continue
                draft, ends_row = draft_next(rows, row, end, logits[index], self._draws, self._chooser)
                drafts[row].append(draft)
                if len(drafts[row]) < wanted[row] and not ends_row:
                    kept.append(index)
            left = [left[index] for index in kept]
            if left:
                states = self._assistant.next_states(hidden)[kept]
        for row, proposed in drafts.items():
            rows.draft(row, proposed)
        return sum(map(len, drafts.values()))

    def _forward(self, rows: Rows, left: Sequence[int], ends: Sequence[int], states: Tensor) -> Tensor:
        """Return the assistant's hidden states after the first `ends` tokens of each row, drafts included."""
        inputs = rows.span([(row, rows.lengths[row] - 1, rows.lengths[row]) for row in left])
        tokens = torch.tensor([int(rows.token_ids[row, end - 1]) for row, end in zip(left, ends)])
        embedded = self._embed(to_device(tokens, states.device))
        return self._assistant.hidden(embedded, states, inputs.positions, self._caches, self._seen(inputs.batch))

    def _seen(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch of the tokens before the newest one of each row."""
        groups = [batch.groups[group] for group in self._groups]
        return replace(
            batch,
            context_len=tuple([length - 1 for length in batch.context_len]),
            groups=tuple([replace(group, window=max(0, group.window - 1)) for group in groups]),
        )
