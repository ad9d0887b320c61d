"""Qwen3-Next, and the text models of Qwen 3.5, with or without experts."""

from __future__ import annotations

from paceline.kernels.interface import Kernels, NormKind
from paceline.models.base import Weights
from paceline.models.blocks import Attention, GatedMLP, Linear
from paceline.models.decoder import Decoder
from paceline.models.delta_net import GatedDeltaNet
from paceline.models.experts import MixtureOfExperts, Router, experts_of, stored_experts
from paceline.models.layers import PreNormLayer
from paceline.models.model_config import ModelConfig


class Qwen3Next(Decoder):
    """A Qwen3-Next or Qwen 3.5: most layers have a gated delta net; a few attend to the whole context, with a gate."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        def make_layer(layer: int, place: str) -> PreNormLayer:
            mixer, mlp = _mixer(config, layer, weights, place, kernels), f"{place}.mlp"
            make_mlp = _experts if config.has_experts(layer) else GatedMLP
            layer_mlp = make_mlp(config, weights, mlp, kernels)
            return PreNormLayer(config, weights, place, kernels, mixer, layer_mlp, NormKind.UNIT_OFFSET)

        super().__init__(config, weights, kernels, make_layer, NormKind.UNIT_OFFSET)
        self.unread = ("mtp.", *self.unread)  # the head that drafts tokens


def _mixer(
    config: ModelConfig, layer: int, weights: Weights, place: str, kernels: Kernels
) -> Attention | GatedDeltaNet:
    kind = config.layer_types[layer]
    if kind == "delta":
        return GatedDeltaNet(config, weights, f"{place}.linear_attn", kernels)
    return Attention(config, kind, weights, f"{place}.self_attn", kernels, NormKind.UNIT_OFFSET)


def _experts(config: ModelConfig, weights: Weights, place: str, kernels: Kernels) -> MixtureOfExperts:
    shared_size = experts_of(config).shared_size
    return MixtureOfExperts(
        Router.take(config, weights, f"{place}.gate", kernels),
        stored_experts(config, weights, f"{place}.experts", kernels),
        kernels,
        GatedMLP(config, weights, f"{place}.shared_expert", kernels, inner=shared_size),
        Linear.take(weights, f"{place}.shared_expert_gate", config.hidden_size, 1, False, kernels),
    )
