"""From pooled hidden states, or those of tokens, to the vectors, scores and labels that clients get: all in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import InvalidRequestError
from paceline.core.pooling import PoolWish
from paceline.core.pooling_config import NormalizeModule, PoolingConfig
from paceline.kernels.interface import Kernels
from paceline.models.pooling.vectors import SCORE_ACTIVATIONS, Normalize, VectorHeads, Vectors
from paceline.models.pooling.words import word_weights


@dataclass(frozen=True, slots=True)
class TokenHeads:
    """The two linear layers over hidden states with which one pass also gives sparse weights and vectors of tokens."""

    sparse: Vectors
    """[tokens, hidden] -> [tokens, 1]."""
    vectors: Vectors
    """[tokens, hidden] -> [tokens, size]."""


class Pooler:
    """What follows after pooling. A row's result depends on no other row. Call it under `torch.inference_mode()`.

    Args:
        folder: the model's folder, which has those of the modules.
        head: makes numbers of labels from a pooled hidden state, or from that of a token; None if there are no labels.
        token_heads: those of a model with `PoolingConfig.dense_tokens`.
        words: makes logits of words from hidden states, for a model with `PoolingConfig.splade`.

    Raises:
        ModelError: weights of a module are missing or do not fit.
    """

    def __init__(
        self,
        config: PoolingConfig,
        folder: Path,
        kernels: Kernels,
        device: torch.device,
        head: Vectors | None = None,
        token_heads: TokenHeads | None = None,
        words: Vectors | None = None,
    ) -> None:
        heads = VectorHeads(folder, kernels, device)
        self.config = config
        self._head, self._token_heads, self._words = head, token_heads, words
        self._modules = [heads.make(module) for module in config.modules]
        self._token_modules = [heads.make(module) for module in config.token_modules]
        self._normalize = Normalize(kernels, device)

    def check(self, wish: PoolWish) -> None:
        """Raise InvalidRequestError if the model does not have the task, or cannot cut vectors to this length."""
        if wish.task not in self.config.tasks:
            raise InvalidRequestError(f"this model does not compute {wish.task}; it computes {_listed(self.config)}")
        if wish.dimensions is not None and wish.task == "embed":
            self.config.check_dimensions(wish.dimensions)

    def vectors(self, pooled: Tensor, wish: PoolWish) -> Tensor:
        """Return the results of inputs for the tasks with one row, from pooled fp32 [inputs, hidden]: fp32 [inputs,
        dim].
        """
        if wish.task == "embed":
            return self._embedded(pooled, wish)
        assert self._head is not None
        return self._activated(self._head(pooled), wish)

    def tokens(self, hidden: Tensor, wish: PoolWish) -> Tensor:
        """Return the results of tokens for the tasks with a row for each, from fp32 [tokens, hidden]: fp32 [tokens,
        size]. `keep` leaves rows out afterwards.
        """
        if wish.task == "token_classify":
            assert self._head is not None
            return self._activated(self._head(hidden), wish)
        if wish.task == "sparse" and self._words is not None:
            return hidden  # logits of all words are too large for many tokens at once
        if wish.task == "sparse":
            assert self._token_heads is not None
            return torch.relu(self._token_heads.sparse(hidden))
        if self._token_heads is not None:
            vectors = self._token_heads.vectors(hidden)
            return vectors if wish.normalize is False else self._normalize(vectors)
        return self._through(hidden, self._token_modules, self.config.token_modules, wish)

    def keep(self, rows: Tensor, token_ids: Sequence[int], wish: PoolWish) -> Tensor:
        """Return the final rows of one input, from those of all its tokens.

        For "sparse", the result is fp32 [different ids, 2]: the id of a token and its largest weight, in order of ids.
        """
        config = self.config
        if wish.task == "sparse" and self._words is not None:
            assert config.splade is not None
            return word_weights(config.splade, self._words, rows)
        if wish.task == "sparse":
            return self._sparse(rows, token_ids)
        if not config.keeps_first_token and wish.task == "token_embed":
            return rows[1:]
        skipped = config.skipped_ids if (wish.role or "document") in config.skipping_roles else frozenset()
        only = config.kept_ids if wish.role != "query" else frozenset()
        if not skipped and not only:
            return rows
        kept = [token not in skipped and (not only or token in only) for token in token_ids]
        return rows[torch.tensor(kept, device=rows.device)]

    def _embedded(self, pooled: Tensor, wish: PoolWish) -> Tensor:
        x = self._through(pooled, self._modules, self.config.modules, wish)
        size = wish.dimensions
        is_cut = size is not None and size < x.shape[1]
        x = x[:, :size].contiguous() if is_cut else x
        normalizes = self.config.normalizes if wish.normalize is None else wish.normalize
        # A vector that has the length 1 already keeps its bits.
        return self._normalize(x) if normalizes and (is_cut or not self._ends_normalized) else x

    @property
    def _ends_normalized(self) -> bool:
        modules = self.config.modules
        return bool(modules) and isinstance(modules[-1], NormalizeModule)

    def _through(self, x: Tensor, functions: Sequence[Vectors], modules: Sequence[object], wish: PoolWish) -> Tensor:
        """Apply modules in order; without the last one if it normalizes and this is not wanted."""
        last = len(modules) - 1
        for index, (function, module) in enumerate(zip(functions, modules)):
            if index < last or wish.normalize is not False or not isinstance(module, NormalizeModule):
                x = function(x)
        return x

    def _activated(self, numbers: Tensor, wish: PoolWish) -> Tensor:
        return numbers if wish.activation is False else SCORE_ACTIVATIONS[self.config.activation](numbers)

    def _sparse(self, weights: Tensor, token_ids: Sequence[int]) -> Tensor:
        largest: dict[int, float] = {}
        for token, weight in zip(token_ids, weights[:, 0].tolist()):
            if weight > 0 and token not in self.config.unweighted_ids:
                largest[token] = max(weight, largest.get(token, 0.0))
        return torch.tensor(sorted(largest.items()), dtype=torch.float32).view(-1, 2)


def _listed(config: PoolingConfig) -> str:
    return " and ".join(sorted(config.tasks))
