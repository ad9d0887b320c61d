"""Gemma4AssistantForCausalLM and Gemma4UnifiedAssistantForCausalLM: they draft tokens for a Gemma 4.

An assistant has no keys and values. Its layers attend to those of its target's last layers that store some. Its input
is the target's embedding of the newest token, and a state: for the first draft, the target's hidden state after which
this token was chosen; for each further draft, a projection of the assistant's own hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.kernels.batch import AttentionBatch
from paceline.kernels.caches import AnyCache
from paceline.kernels.interface import ForwardInputs, Kernels, Logits, NormKind
from paceline.models.base import Weights
from paceline.models.blocks import Embedding, Linear
from paceline.models.decoder import Decoder
from paceline.models.gemma4 import Gemma4Layer
from paceline.models.layers import run_layers
from paceline.models.model_config import Assistant, LayerType, ModelConfig

_UNLIKELY = -10_000.0
"""Logit of a token that belongs to no chosen centroid. Its probability is 0 if any other token is allowed."""


class AssistantWeights(Weights, Protocol):
    """`Weights` from which vectors of indices can also be taken."""

    def take_indices(self, name: str, size: int) -> Tensor:
        """Return the vector of this name, on the model's device: int64 [size]."""


class Gemma4Assistant(Decoder):
    """An assistant with its weights. Call it under `torch.inference_mode()`."""

    def __init__(self, config: ModelConfig, weights: AssistantWeights, kernels: Kernels) -> None:
        super().__init__(
            config,
            weights,
            kernels,
            lambda layer, layer_place: Gemma4Layer(config, layer, weights, layer_place, kernels, reads=True),
            norm_kind=NormKind.WIDE,
        )
        self.kinds: tuple[LayerType, ...] = tuple(dict.fromkeys(config.layer_types))
        """The types of layers. A batch has one group for each of them, which is the target's."""
        self.group_shapes, self.layer_groups = (), tuple(map(self.kinds.index, config.layer_types))
        sizes = assistant_of(config)
        hidden_size, target = config.hidden_size, sizes.target_size
        self._pre = Linear.take(weights, "pre_projection", 2 * target, hidden_size, False, kernels)
        self._post = Linear.take(weights, "post_projection", hidden_size, target, False, kernels)
        self._centroids = _Centroids(config, weights, kernels, self._embedding) if sizes.centroids else None
        self._run = kernels.compile(self.forward)

    def hidden(
        self, embedded: Tensor, states: Tensor, positions: Tensor, caches: Sequence[AnyCache], batch: AttentionBatch
    ) -> Tensor:
        """Return hidden states after the final norm, [tokens, hidden], one for each context of a batch.

        Args:
            embedded: [tokens, target's hidden]: the target's embeddings of the newest tokens.
            states: [tokens, target's hidden]: hidden states of the target, or the result of `next_states`.
            positions: int64 [tokens]: the same in all calls between two steps of the target.
            caches: caches of the target, one for each of `kinds`.
            batch: the tokens of each context that the assistant sees, of which the last counts as its query's own. It
                has one group for each of `kinds`.
        """
        given = torch.cat((embedded, states), dim=1)
        by_layer = [caches[group] for group in self.layer_groups]
        return self._run(ForwardInputs(positions, positions, by_layer, batch, further=(given,)))

    def next_states(self, hidden: Tensor) -> Tensor:
        """Return the states for the next drafts: [tokens, target's hidden].

        Args:
            hidden: the result of `hidden`.
        """
        return self._post(hidden)

    def logits(self, hidden: Tensor) -> Logits:
        return super().logits(hidden) if self._centroids is None else self._centroids.logits(hidden)

    def forward(self, inputs: ForwardInputs, embedded: bool = False) -> Tensor:
        """Compute all layers. Token ids are not read: `inputs.further` has the tensors from which the first layer's
        input is computed.
        """
        x = self._pre(inputs.further[0])
        steps = self._attention_steps(x, inputs, ())
        return run_layers(self._layers, self._norm, x, inputs.caches, steps, inputs.taps)


class _Centroids:
    """A head that computes the logits of some tokens only: those of the centroids that fit a hidden state best."""

    def __init__(self, config: ModelConfig, weights: AssistantWeights, kernels: Kernels, embedding: Embedding) -> None:
        sizes, place = assistant_of(config), "masked_embedding"
        self._best, self._vocab_size = sizes.best_centroids, config.vocab_size
        self._embedding = embedding
        self._centroids = Linear.take(
            weights, f"{place}.centroids", config.hidden_size, sizes.centroids, False, kernels
        )
        tokens = weights.take_indices(f"{place}.token_ordering", config.vocab_size)
        if not tokens.is_meta and not torch.equal(tokens.sort().values.cpu(), torch.arange(config.vocab_size)):
            raise ModelError(f"{place}.token_ordering must have each of {config.vocab_size} tokens once")
        self._tokens = tokens.view(sizes.centroids, -1)

    def logits(self, hidden: Tensor) -> Logits:
        """Return the logits of the next token for each of hidden [n, hidden]. Tokens of other clusters get
        _UNLIKELY.
        """
        best = self._centroids(hidden).topk(self._best, dim=1).indices
        tokens = self._tokens[best].flatten(1)
        rows = self._embedding.embed(tokens.flatten()).view(*tokens.shape, -1)
        found = torch.bmm(rows.float(), hidden.float().unsqueeze(2)).squeeze(2)
        logits = torch.full((len(hidden), self._vocab_size), _UNLIKELY, device=hidden.device)
        return Logits(logits.scatter_(1, tokens, found))


def assistant_of(config: ModelConfig) -> Assistant:
    assert config.assistant is not None
    return config.assistant
