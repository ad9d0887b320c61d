"""GraniteMoeHybridForCausalLM, which are the hybrid models of Granite 4, and GraniteMoeForCausalLM."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.caches import AnyCache
from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.blocks import Attention, AttentionStep, GatedMLP, RMSNorm
from paceline.models.decoder import Decoder
from paceline.models.experts import MixtureOfExperts, Router, fused_experts
from paceline.models.mamba import MambaMixer
from paceline.models.model_config import LayerType, ModelConfig


class GraniteHybrid(Decoder):
    """A Granite hybrid: most layers have a Mamba-2 mixer; a few attend to the whole context, without positions.

    Its layers have an MLP, experts, or both side by side. Models of GraniteMoe have experts, and attention only.
    """

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        super().__init__(
            config,
            weights,
            kernels,
            lambda layer, place: _Layer(config, config.layer_types[layer], weights, place, kernels),
            embedding_scale=config.embedding_multiplier,
        )


class _Layer:
    def __init__(self, config: ModelConfig, kind: LayerType, weights: Weights, place: str, kernels: Kernels) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.norm = RMSNorm(weights, f"{place}.input_layernorm", size, eps, kernels)
        self._mixer: Attention | MambaMixer
        if kind == "mamba":
            self._mixer = MambaMixer(config, weights, f"{place}.mamba", kernels)
        else:
            self._mixer = Attention(config, kind, weights, f"{place}.self_attn", kernels)
        self._mlp_norm = RMSNorm(weights, f"{place}.post_attention_layernorm", size, eps, kernels)
        self._mlp = _feed_forward(config, weights, place, kernels)
        self._multiplier = config.residual_multiplier
        self._kernels = kernels

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        scale, factor = self._kernels.scale, self._multiplier
        x, normed = self._mlp_norm.of_sum(x, scale(self._mixer(normed, cache, step), factor))
        return next_norm.of_sum(x, scale(self._mlp(normed), factor))


def _feed_forward(config: ModelConfig, weights: Weights, place: str, kernels: Kernels) -> GatedMLP | MixtureOfExperts:
    def take_mlp() -> GatedMLP:
        return GatedMLP(config, weights, f"{place}.shared_mlp", kernels, fused=True)

    if config.experts is None:
        return take_mlp()
    experts_place = f"{place}.block_sparse_moe"
    router = Router.take(config, weights, f"{experts_place}.router.layer", kernels)
    experts = fused_experts(
        config, weights, f"{experts_place}.input_linear.weight", f"{experts_place}.output_linear.weight", kernels
    )
    return MixtureOfExperts(router, experts, kernels, take_mlp() if config.experts.shared_size else None)
