"""LlamaForCausalLM: Llama 2 and 3, SmolLM2 and others with this architecture."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.interface import AnyCache, Kernels
from paceline.models.base import Weights
from paceline.models.blocks import Attention, AttentionStep, GatedMLP, RMSNorm
from paceline.models.decoder import Decoder
from paceline.models.model_config import LayerType, ModelConfig


class Llama(Decoder):
    """A Llama model: norms before attention and MLP; every layer attends to the whole context."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        super().__init__(config, weights, kernels, lambda kind, place: _Layer(config, kind, weights, place, kernels))


class _Layer:
    def __init__(self, config: ModelConfig, kind: LayerType, weights: Weights, place: str, kernels: Kernels) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.norm = RMSNorm(weights, f"{place}.input_layernorm", size, eps, kernels)
        self._attention = Attention(config, kind, weights, f"{place}.self_attn", kernels)
        self._mlp_norm = RMSNorm(weights, f"{place}.post_attention_layernorm", size, eps, kernels)
        self._mlp = GatedMLP(config, weights, f"{place}.mlp", kernels)

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        x, normed = self._mlp_norm.of_sum(x, self._attention(normed, cache, step))
        return next_norm.of_sum(x, self._mlp(normed))
