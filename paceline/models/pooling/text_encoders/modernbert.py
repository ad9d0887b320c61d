"""ModernBERT: norms before attention and MLPs, rotary embeddings, and windows in most layers.

Warner et al. 2024, https://arxiv.org/abs/2412.13663.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.interface import ForwardInputs, Kernels
from paceline.models.base import Weights
from paceline.models.blocks import Linear
from paceline.models.pooling.text_encoders.blocks import BidirectionalAttention, TextMLP, TextNorm
from paceline.models.rotary import Rotation, inverse_frequencies
from paceline.models.text_encoder_config import TextEncoderConfig


class PreNormEncoder:
    """A `TextEncoder` whose norms precede attention and MLPs.

    Args:
        place: what the names of all tensors begin with.
    """

    def __init__(
        self, config: TextEncoderConfig, weights: Weights, place: str, device: torch.device, kernels: Kernels
    ) -> None:
        self.config = config
        words = f"{place}embeddings.tok_embeddings.weight"
        self._words = weights.take_packed(words, config.vocab_size, config.hidden_size)
        self._norm = TextNorm(weights, f"{place}embeddings.norm", config, kernels)
        self._layers = [
            _Layer(config, weights, f"{place}layers.{layer}", layer, kernels) for layer in range(config.layers)
        ]
        self._last_norm = TextNorm(weights, f"{place}final_norm", config, kernels)
        ropes = [rope for rope in (config.rope, config.local_rope) if rope is not None]
        self._frequencies = [inverse_frequencies(rope, config.head_dim).to(device) for rope in ropes]
        self._kernels = kernels

    def forward(self, inputs: ForwardInputs) -> Tensor:
        kernels = self._kernels
        rotations = [Rotation(*kernels.rotation(inputs.positions, each)) for each in self._frequencies]
        x = self._norm(kernels.embed(inputs.token_ids, self._words))
        for layer in self._layers:
            x = layer(x, inputs, rotations)
        return self._last_norm(x)


class _Layer:
    def __init__(self, config: TextEncoderConfig, weights: Weights, place: str, layer: int, kernels: Kernels) -> None:
        size, inner = config.hidden_size, config.inner_size
        self._group = int(layer in config.local_layers)
        self._norm = TextNorm(weights, f"{place}.attn_norm", config, kernels) if layer else None
        q, k, v = Linear.take_parts(weights, f"{place}.attn.Wqkv", size, (size,) * 3, config.qkv_bias, kernels)
        output = Linear.take(weights, f"{place}.attn.Wo", size, size, config.attention_bias, kernels)
        self._attention = BidirectionalAttention(q, k, v, output, config.heads, config.head_dim, self._group, kernels)
        self._mlp_norm = TextNorm(weights, f"{place}.mlp_norm", config, kernels)
        gate, up = Linear.take_parts(weights, f"{place}.mlp.Wi", size, (inner, inner), config.inner_bias, kernels)
        down = Linear.take(weights, f"{place}.mlp.Wo", inner, size, config.mlp_bias, kernels)
        self._mlp = TextMLP(up, gate, down, config.activation, kernels)
        self._kernels = kernels

    def __call__(self, x: Tensor, inputs: ForwardInputs, rotations: list[Rotation]) -> Tensor:
        normed = x if self._norm is None else self._norm(x)
        x = self._kernels.add(x, self._attention(normed, inputs, rotations[self._group]))
        return self._kernels.add(x, self._mlp(self._mlp_norm(x)))
