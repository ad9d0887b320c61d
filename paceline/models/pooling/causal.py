"""Pooling of decoders, whose hidden states come in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.pooling import ROW_TASKS, PoolWish
from paceline.core.pooling_choice import PoolingChoice
from paceline.core.pooling_folder import read_pooling_config
from paceline.kernels import kernels_beside
from paceline.models.pooling.decoder_heads import load_head
from paceline.models.pooling.pooler import Pooler
from paceline.models.pooling.sums import reduction


def load_pooler(folder: Path, bidirectional: bool, choice: PoolingChoice | None = None) -> Pooler | None:
    """Return what follows after the hidden states of a folder's decoder; None if it has no files about pooling.

    Args:
        bidirectional: whether the model's tokens see each other.
        choice: how a model without such files pools nevertheless.

    Raises:
        ModelError: weights of a head are missing or unfit, the model attends in another way than its files say, or they
            say something that Paceline does not compute.
    """
    config = read_pooling_config(folder, choice)
    if config is None:
        return None
    if (config.attention == "full") != bidirectional:
        raise ModelError(f"{folder}: the model attends in another way than its files about pooling say")
    if config.expansion is not None:
        raise ModelError(f"{folder}: queries that are expanded by further tokens need an encoder, not a causal model")
    kernels = kernels_beside()
    return Pooler(config, folder, kernels, torch.device("cpu"), load_head(folder, config, kernels))


class RunningPool:
    """The pooling of one input. Chunks of hidden states come in order of position, and may come again.

    A result of the last token alone needs no hidden states of the tokens before it, so their KV may come from the
    cache. All others need those of every token.
    """

    states: Literal["last", "all"] = "all"
    """The tokens whose hidden states are needed."""
    reusable = 0
    """Number of the first tokens whose KV may come from the cache."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._next = 0

    @property
    def is_complete(self) -> bool:
        """Whether the last token has come."""
        return self._next == self._tokens

    @torch.inference_mode()
    def add(self, first: int, rows: Tensor) -> None:
        """Take the hidden states of tokens [first, first + len(rows)), fp32 [tokens, hidden]. Tokens that have come
        before are left out: a request that lost its place computes them again, with the same bits.
        """
        rows = rows[max(0, self._next - first) :]
        if len(rows):
            self._take(rows)
            self._next = max(first, self._next) + len(rows)

    @torch.inference_mode()
    def result(self) -> Tensor:
        """Return the result of all tokens, fp32 [rows, dim]. Raises ModelError if it is not finite."""
        found = self._result()
        if not bool(found.isfinite().all()):
            raise ModelError("the model computed a value for this input that is not finite")
        return found

    def _take(self, rows: Tensor) -> None:
        """Take the hidden states of the next tokens."""
        raise NotImplementedError

    def _result(self) -> Tensor:
        raise NotImplementedError


class _VectorPool(RunningPool):
    """One row of all tokens."""

    def __init__(self, tokens: int, prompt: int, pooler: Pooler, wish: PoolWish) -> None:
        super().__init__(tokens)
        self._pooler, self._wish = pooler, wish
        config = pooler.config
        skipped = 0 if config.include_prompt else min(prompt, tokens - 1)
        if set(config.pooling) == {"last"}:
            self.states, self.reusable, skipped = "last", tokens - 1, 0
        self._reductions = [reduction(kind, skipped) for kind in config.pooling]

    def _take(self, rows: Tensor) -> None:
        for each in self._reductions:
            each.add(rows)

    def _result(self) -> Tensor:
        return self._pooler.vectors(torch.cat([each.result() for each in self._reductions])[None], self._wish)


class _TokenPool(RunningPool):
    """One row of each token."""

    def __init__(self, token_ids: Sequence[int], pooler: Pooler, wish: PoolWish) -> None:
        super().__init__(len(token_ids))
        self._token_ids, self._pooler, self._wish = token_ids, pooler, wish
        self._rows: list[Tensor] = []

    def _take(self, rows: Tensor) -> None:
        self._rows.append(self._pooler.tokens(rows, self._wish))

    def _result(self) -> Tensor:
        return self._pooler.keep(torch.cat(self._rows), self._token_ids, self._wish).contiguous()


Begin = Callable[[Sequence[int], int], RunningPool]
"""Begins the pooling of an input, from its token ids and the number of those that are its prompt's."""


def beginner(pooler: Pooler, wish: PoolWish) -> Begin:
    """Return a function that begins the pooling of an input.

    Raises InvalidRequestError if the model does not have the task, or cannot cut vectors to this length.
    """
    pooler.check(wish)
    if wish.task in ROW_TASKS:
        return lambda token_ids, prompt: _TokenPool(token_ids, pooler, wish)
    return lambda token_ids, prompt: _VectorPool(len(token_ids), prompt, pooler, wish)
