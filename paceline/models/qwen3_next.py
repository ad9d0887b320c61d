"""Qwen3-Next, and the text models of Qwen 3.5, with or without experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from paceline.kernels.caches import AnyCache
from paceline.kernels.interface import Kernels, NormKind
from paceline.models.base import Weights
from paceline.models.blocks import Attention, AttentionStep, GatedMLP, Layer, Linear, RMSNorm
from paceline.models.decoder import Decoder
from paceline.models.delta_net import GatedDeltaNet
from paceline.models.experts import MixtureOfExperts, Router, experts_of, stored_experts
from paceline.models.model_config import LayerType, ModelConfig


class Qwen3Next(Decoder):
    """A Qwen3-Next or Qwen 3.5: most layers have a gated delta net; a few attend to the whole context, with a gate."""

    unread: Sequence[str] = ("mtp.", "model.visual.")
    """A head that drafts tokens, and the encoder of images."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        layers = range(config.num_layers)
        dense = iter(config.experts is None or layer in config.experts.dense_layers for layer in layers)

        def make_layer(kind: LayerType, place: str) -> Layer:
            return _Layer(config, kind, weights, place, kernels, next(dense))

        has_media = config.architecture.endswith("ForConditionalGeneration")
        place = "model.language_model" if has_media else "model"
        super().__init__(config, weights, kernels, make_layer, NormKind.UNIT_OFFSET, place=place)


class _Layer:
    def __init__(
        self, config: ModelConfig, kind: LayerType, weights: Weights, place: str, kernels: Kernels, is_dense: bool
    ) -> None:
        norm = partial(
            RMSNorm, size=config.hidden_size, eps=config.norm_eps, kernels=kernels, kind=NormKind.UNIT_OFFSET
        )
        self.norm = norm(weights, f"{place}.input_layernorm")
        self._mixer: Attention | GatedDeltaNet
        if kind == "delta":
            self._mixer = GatedDeltaNet(config, weights, f"{place}.linear_attn", kernels)
        else:
            self._mixer = Attention(config, kind, weights, f"{place}.self_attn", kernels, NormKind.UNIT_OFFSET)
        self._mlp_norm = norm(weights, f"{place}.post_attention_layernorm")
        mlp = f"{place}.mlp"
        self._mlp = GatedMLP(config, weights, mlp, kernels) if is_dense else _experts(config, weights, mlp, kernels)

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        x, normed = self._mlp_norm.of_sum(x, self._mixer(normed, cache, step))
        return next_norm.of_sum(x, self._mlp(normed))


def _experts(config: ModelConfig, weights: Weights, place: str, kernels: Kernels) -> MixtureOfExperts:
    shared_size = experts_of(config).shared_size
    return MixtureOfExperts(
        Router.take(config, weights, f"{place}.gate", kernels),
        stored_experts(config, weights, f"{place}.experts", kernels),
        kernels,
        GatedMLP(config, weights, f"{place}.shared_expert", kernels, inner=shared_size),
        Linear.take(weights, f"{place}.shared_expert_gate", config.hidden_size, 1, False, kernels),
    )
