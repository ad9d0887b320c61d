"""A model of texts that is an encoder only, as pool workers use it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.errors import InvalidRequestError
from paceline.core.pooling import ROW_TASKS, PoolWish
from paceline.core.pooling_config import PoolingConfig, QueryExpansion
from paceline.models.pooling.pooler import Pooler
from paceline.models.pooling.sums import reduction
from paceline.models.pooling.text_encoders.base import Encode


@dataclass(frozen=True, slots=True)
class TextRow:
    """The tokens of one input."""

    token_ids: Sequence[int]
    """At least one."""
    second_start: int = 0
    """Index of the first token of the second text of a pair; 0 if there is no pair."""
    prompt_tokens: int = 0
    """Number of tokens at the front that are a prompt's, for models that leave them out of pooling."""


@dataclass(frozen=True, slots=True)
class PoolResult:
    """The result of one input."""

    values: Tensor | None
    """fp32 [rows, dim], dense, on the CPU; None if there is an error. For "sparse", a row is the id of a token and its
    weight.
    """
    error: str = ""
    """Why there are no values: a sentence for the client."""


class PoolingModel:
    """An encoder of text, or a table of vectors, with all that follows. The result of an input depends on no other
    input.
    """

    def __init__(self, config: PoolingConfig, encoder: Encode, pooler: Pooler) -> None:
        self.config = config
        self._encoder, self._pooler = encoder, pooler

    def check(self, inputs: Sequence[TextRow], wish: PoolWish) -> None:
        """Raise InvalidRequestError if the model cannot compute these inputs."""
        self._pooler.check(wish)
        encoder, most = self._encoder, self.config.max_tokens
        for row in inputs:
            length = len(row.token_ids)
            if not 0 < length <= most:
                raise InvalidRequestError(f"an input must have 1 to {most} tokens for this model, not {length}")
            if not 0 <= min(row.token_ids) <= max(row.token_ids) < encoder.vocab_size:
                raise InvalidRequestError(f"token ids must be from 0 to {encoder.vocab_size - 1} for this model")
            if not 0 <= row.second_start < length or not 0 <= row.prompt_tokens < length:
                raise InvalidRequestError("an input must have a token after its prompt, and its second text inside")

    @torch.inference_mode()
    def run(self, inputs: Sequence[TextRow], wish: PoolWish) -> list[PoolResult]:
        """Compute inputs in one pass. The caller bounds the number of their tokens.

        Raises:
            InvalidRequestError: as `check`.
        """
        self.check(inputs, wish)
        if not inputs:
            return []
        seen, expansion = [len(row.token_ids) for row in inputs], self.config.expansion
        if expansion is not None and wish.role == "query":
            inputs = [_expanded(row, expansion) for row in inputs]
        lengths = [len(row.token_ids) for row in inputs]
        if expansion is None or expansion.attends:
            seen = lengths
        token_ids = torch.tensor([token for row in inputs for token in row.token_ids], dtype=torch.int64)
        hidden = self._encoder(token_ids, self._types(inputs, lengths), lengths, seen)
        if wish.task in ROW_TASKS:
            parts = _parts(self._pooler.tokens(hidden.float(), wish), lengths)
            found = [self._pooler.keep(part, row.token_ids, wish) for part, row in zip(parts, inputs)]
        else:
            pooled = self._pooled(hidden, inputs, lengths)
            found = [row[None] for row in self._pooler.vectors(pooled, wish)]
        return [_result(each.cpu().contiguous()) for each in found]

    def _types(self, inputs: Sequence[TextRow], lengths: Sequence[int]) -> Tensor:
        """Return the types of all tokens: 0, and 1 in the second text of a pair if the model has two types."""
        types = torch.zeros(sum(lengths), dtype=torch.int64)
        if self._encoder.types > 1 and any(row.second_start for row in inputs):
            for row, part in zip(inputs, _parts(types, lengths)):
                if row.second_start:
                    part[row.second_start :] = 1
        return types

    def _pooled(self, hidden: Tensor, inputs: Sequence[TextRow], lengths: Sequence[int]) -> Tensor:
        """Return one vector of each input's hidden states: fp32 [inputs, hidden]."""
        pooled = []
        for row, states in zip(inputs, _parts(hidden, lengths)):
            skipped = 0 if self.config.include_prompt else row.prompt_tokens
            parts = []
            for kind in self.config.pooling:
                reduced = reduction(kind, skipped)
                reduced.add(states.float())
                parts.append(reduced.result())
            pooled.append(torch.cat(parts))
        return torch.stack(pooled)


def _expanded(row: TextRow, expansion: QueryExpansion) -> TextRow:
    """Return a query with the tokens that follow it up to a length."""
    missing = max(0, expansion.length - len(row.token_ids))
    return replace(row, token_ids=[*row.token_ids, *[expansion.token_id] * missing])


def _parts(x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return views of the rows of each input."""
    ends = itertools.accumulate(lengths)
    return [x[end - length : end] for length, end in zip(lengths, ends)]


def _result(values: Tensor) -> PoolResult:
    if not bool(values.isfinite().all()):
        return PoolResult(None, "the model computed a value for this input that is not finite")
    return PoolResult(values)
