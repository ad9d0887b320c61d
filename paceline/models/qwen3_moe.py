"""Qwen3MoeForCausalLM: the models of Qwen 3 with experts."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.caches import AnyCache
from paceline.kernels.interface import Kernels, NormKind
from paceline.models.base import Weights
from paceline.models.blocks import Attention, AttentionStep, GatedMLP, Layer, RMSNorm
from paceline.models.decoder import Decoder
from paceline.models.experts import MixtureOfExperts, Router, experts_of, separate_experts
from paceline.models.model_config import LayerType, ModelConfig


class Qwen3Moe(Decoder):
    """A Qwen 3 model with norms of queries and keys, and experts instead of MLPs in most or all layers."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        dense = iter(layer in experts_of(config).dense_layers for layer in range(config.num_layers))

        def make_layer(kind: LayerType, place: str) -> Layer:
            return _Layer(config, kind, weights, place, kernels, next(dense))

        super().__init__(config, weights, kernels, make_layer)


class _Layer:
    def __init__(
        self, config: ModelConfig, kind: LayerType, weights: Weights, place: str, kernels: Kernels, is_dense: bool
    ) -> None:
        size, eps, mlp = config.hidden_size, config.norm_eps, f"{place}.mlp"
        self.norm = RMSNorm(weights, f"{place}.input_layernorm", size, eps, kernels)
        self._attention = Attention(config, kind, weights, f"{place}.self_attn", kernels, norms=NormKind.ROUNDED)
        self._mlp_norm = RMSNorm(weights, f"{place}.post_attention_layernorm", size, eps, kernels)
        self._mlp: GatedMLP | MixtureOfExperts
        if is_dense:
            self._mlp = GatedMLP(config, weights, mlp, kernels)
        else:
            self._mlp = MixtureOfExperts(
                Router.take(config, weights, f"{mlp}.gate", kernels),
                separate_experts(config, weights, f"{mlp}.experts", kernels),
                kernels,
            )

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        x, normed = self._mlp_norm.of_sum(x, self._attention(normed, cache, step))
        return next_norm.of_sum(x, self._mlp(normed))
