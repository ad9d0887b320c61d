"""BERT and what has its order of norms: RoBERTa, XLM-R, DistilBERT, ELECTRA, MPNet, NomicBert, GTE.

Norms follow the sums of the residual stream: Devlin et al. 2018, https://arxiv.org/abs/1810.04805. NomicBert and GTE
have rotary embeddings in place of a table of positions, and MLPs with a gate.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from paceline.kernels.interface import ForwardInputs, Kernels
from paceline.models.base import Weights
from paceline.models.blocks import Linear
from paceline.models.pooling.text_encoders.blocks import BidirectionalAttention, TextMLP, TextNorm
from paceline.models.pooling.text_encoders.distances import DistanceAttention
from paceline.models.pooling.text_encoders.names import LayerNames, names_of
from paceline.models.rotary import Rotation, inverse_frequencies
from paceline.models.text_encoder_config import TextEncoderConfig


class PostNormEncoder:
    """A `TextEncoder` whose norms follow the sums.

    Args:
        place: what the names of all tensors begin with.
    """

    def __init__(
        self, config: TextEncoderConfig, weights: Weights, place: str, device: torch.device, kernels: Kernels
    ) -> None:
        names, size = names_of(config.model_type, weights, place), config.embedding_size or config.hidden_size
        self.config = config
        words = f"{place}embeddings.word_embeddings.weight"
        self._words = weights.take_packed(words, config.vocab_size, size)
        self._positions = self._types = None
        if config.positions:
            table = f"{place}embeddings.position_embeddings.weight"
            self._positions = weights.take_packed(table, config.positions, size)
        if config.types:
            table = f"{place}embeddings.token_type_embeddings.weight"
            self._types = weights.take_packed(table, config.types, size)
        self._norm = TextNorm(weights, f"{place}{names.embedding_norm}", config, kernels, size)
        self._project = None
        if size != config.hidden_size:
            self._project = Linear.take(weights, f"{place}embeddings_project", size, config.hidden_size, True, kernels)
        distances = None
        if config.distance_buckets:
            shape = config.distance_buckets, config.heads
            distances = weights.take(f"{place}encoder.relative_attention_bias.weight", *shape, dtype=torch.float32)
        self._layers = [
            _Layer(config, weights, f"{place}{names.layers}.{layer}", names.layer, kernels, distances)
            for layer in range(config.layers)
        ]
        rope = config.rope
        self._frequencies = None if rope is None else inverse_frequencies(rope, config.head_dim).to(device)
        self._kernels = kernels

    def forward(self, inputs: ForwardInputs) -> Tensor:
        kernels, (positions, types) = self._kernels, inputs.further
        x = kernels.embed(inputs.token_ids, self._words)
        if self._types is not None:
            x = kernels.add(x, kernels.embed(types, self._types))
        if self._positions is not None:
            x = kernels.add(x, kernels.embed(positions, self._positions))
        rotation = None
        if self._frequencies is not None:
            rotation = Rotation(*kernels.rotation(inputs.positions, self._frequencies))
        x = self._norm(x)
        if self._project is not None:
            x = self._project(x)
        for layer in self._layers:
            x = layer(x, inputs, rotation)
        return x


class _Layer:
    def __init__(
        self,
        config: TextEncoderConfig,
        weights: Weights,
        place: str,
        names: LayerNames,
        kernels: Kernels,
        distances: Tensor | None,
    ) -> None:
        size, inner = config.hidden_size, config.inner_size
        take = partial(Linear.take, weights, kernels=kernels)
        parts = partial(Linear.take_parts, weights, kernels=kernels)
        if len(names.qkv) == 1:
            q, k, v = parts(f"{place}.{names.qkv[0]}", size, (size,) * 3, config.qkv_bias)
        else:
            q, k, v = (take(f"{place}.{name}", size, size, config.qkv_bias) for name in names.qkv)
        output = take(f"{place}.{names.output}", size, size, config.attention_bias)
        self._attention: BidirectionalAttention | DistanceAttention
        if distances is None:
            self._attention = BidirectionalAttention(q, k, v, output, config.heads, config.head_dim, 0, kernels)
        else:
            self._attention = DistanceAttention(q, k, v, output, config.heads, config.head_dim, distances)
        self._attention_norm = TextNorm(weights, f"{place}.{names.attention_norm}", config, kernels)
        gate = None
        if not config.gated:
            up = take(f"{place}.{names.inner[0]}", size, inner, config.inner_bias)
        elif len(names.inner) == 1:
            up, gate = parts(f"{place}.{names.inner[0]}", size, (inner, inner), config.inner_bias)
        else:
            up, gate = (take(f"{place}.{name}", size, inner, config.inner_bias) for name in names.inner)
        down = take(f"{place}.{names.down}", inner, size, config.mlp_bias)
        self._mlp = TextMLP(up, gate, down, config.activation, kernels)
        self._mlp_norm = TextNorm(weights, f"{place}.{names.mlp_norm}", config, kernels)

    def __call__(self, x: Tensor, inputs: ForwardInputs, rotation: Rotation | None) -> Tensor:
        x = self._attention_norm.of_sum(x, self._attention(x, inputs, rotation))
        return self._mlp_norm.of_sum(x, self._mlp(x))
