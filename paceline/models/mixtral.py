"""MixtralForCausalLM."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.caches import AnyCache
from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.blocks import Attention, AttentionStep, RMSNorm
from paceline.models.decoder import Decoder
from paceline.models.experts import MixtureOfExperts, Router, separate_experts
from paceline.models.model_config import LayerType, ModelConfig


class Mixtral(Decoder):
    """A Mixtral model: a Llama whose MLPs are experts."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        super().__init__(config, weights, kernels, lambda kind, place: _Layer(config, kind, weights, place, kernels))


class _Layer:
    def __init__(self, config: ModelConfig, kind: LayerType, weights: Weights, place: str, kernels: Kernels) -> None:
        size, eps, own = config.hidden_size, config.norm_eps, f"{place}.block_sparse_moe"
        self.norm = RMSNorm(weights, f"{place}.input_layernorm", size, eps, kernels)
        self._attention = Attention(config, kind, weights, f"{place}.self_attn", kernels)
        self._experts_norm = RMSNorm(weights, f"{place}.post_attention_layernorm", size, eps, kernels)
        self._experts = MixtureOfExperts(
            Router.take(config, weights, f"{own}.gate", kernels),
            separate_experts(config, weights, f"{own}.experts", kernels, ("w1", "w3", "w2")),
            kernels,
        )

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        x, normed = self._experts_norm.of_sum(x, self._attention(normed, cache, step))
        return next_norm.of_sum(x, self._experts(normed))
