"""Gemma3ForCausalLM: the text model of Gemma 3."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from paceline.kernels.caches import AnyCache
from paceline.kernels.interface import Kernels, NormKind
from paceline.models.base import Weights
from paceline.models.blocks import Attention, AttentionStep, GatedMLP, RMSNorm
from paceline.models.decoder import Decoder
from paceline.models.model_config import LayerType, ModelConfig


class Gemma3(Decoder):
    """A Gemma 3 model: norms before and after attention and MLP. Most layers attend to a window and rotate faster."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        super().__init__(
            config,
            weights,
            kernels,
            lambda layer, place: _Layer(config, config.layer_types[layer], weights, place, kernels),
            norm_kind=NormKind.UNIT_OFFSET,
            embedding_scale=config.hidden_size**0.5,
        )


class _Layer:
    def __init__(self, config: ModelConfig, kind: LayerType, weights: Weights, place: str, kernels: Kernels) -> None:
        kind_of_norm = NormKind.UNIT_OFFSET
        norm = partial(RMSNorm, size=config.hidden_size, eps=config.norm_eps, kernels=kernels, kind=kind_of_norm)
        self.norm = norm(weights, f"{place}.input_layernorm")
        self._attention = Attention(config, kind, weights, f"{place}.self_attn", kernels, norms=kind_of_norm)
        self._post_attention = norm(weights, f"{place}.post_attention_layernorm")
        self._pre_mlp = norm(weights, f"{place}.pre_feedforward_layernorm")
        self._mlp = GatedMLP(config, weights, f"{place}.mlp", kernels)
        self._post_mlp = norm(weights, f"{place}.post_feedforward_layernorm")

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        x, normed = self._pre_mlp.of_sum(x, self._post_attention(self._attention(normed, cache, step)))
        return next_norm.of_sum(x, self._post_mlp(self._mlp(normed)))
