"""Llama 2 and 3, SmolLM 2 and 3, Mistral, Ministral, Qwen 2 and 3: all have the same layers."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.interface import AnyCache, Kernels
from paceline.models.base import Weights
from paceline.models.blocks import Attention, AttentionStep, GatedMLP, RMSNorm
from paceline.models.decoder import Decoder
from paceline.models.model_config import LayerType, ModelConfig


class Llama(Decoder):
    """A Llama model, or one that differs in its configuration only: norms before attention and MLP.

    Args:
        head_norms: queries and keys have norms over each head (Qwen 3).
    """

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, head_norms: bool = False) -> None:
        def make_layer(kind: LayerType, place: str) -> _Layer:
            return _Layer(config, kind, weights, place, kernels, head_norms)

        super().__init__(config, weights, kernels, make_layer)


class _Layer:
    def __init__(
        self, config: ModelConfig, kind: LayerType, weights: Weights, place: str, kernels: Kernels, head_norms: bool
    ) -> None:
        size, eps, unit_offset = config.hidden_size, config.norm_eps, False if head_norms else None
        self.norm = RMSNorm(weights, f"{place}.input_layernorm", size, eps, kernels)
        self._attention = Attention(config, kind, weights, f"{place}.self_attn", kernels, unit_offset)
        self._mlp_norm = RMSNorm(weights, f"{place}.post_attention_layernorm", size, eps, kernels)
        self._mlp = GatedMLP(config, weights, f"{place}.mlp", kernels)

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        x, normed = self._mlp_norm.of_sum(x, self._attention(normed, cache, step))
        return next_norm.of_sum(x, self._mlp(normed))
