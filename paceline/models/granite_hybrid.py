"""GraniteMoeHybridForCausalLM without experts: the dense hybrid models of Granite 4."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.kernels.interface import AnyCache, AttentionBatch, Kernels, Logits, Taps
from paceline.models.base import Weights, kv_groups
from paceline.models.blocks import (
    Attention,
    AttentionStep,
    Embedding,
    GatedMLP,
    MambaMixer,
    RMSNorm,
    Rotary,
    run_layers,
)
from paceline.models.model_config import LayerType, ModelConfig


class GraniteHybrid:
    """A Granite hybrid: most layers have a Mamba-2 mixer; a few attend to the whole context, usually without positions.

    See `Model`.
    """

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        self.config = config
        self.group_shapes, self.layer_groups = kv_groups(config)
        self._embedding = Embedding(config, weights, kernels)
        self._layers = [
            _Layer(config, kind, weights, f"model.layers.{layer}", kernels)
            for layer, kind in enumerate(config.layer_types)
        ]
        self._norm = RMSNorm(weights, "model.norm", config.hidden_size, config.norm_eps, kernels)
        self._rotary: Rotary | None = None
        if config.rotates:
            self._rotary = Rotary(config.rope, config.head_dim, self._embedding.device, kernels)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[AnyCache],
        batch: AttentionBatch,
        layers: int | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        rotation = self._rotary(positions) if self._rotary is not None else None
        steps = [AttentionStep(rotation, batch, group) for group in batch.groups]
        x = self._embedding.embed(token_ids, scale=self.config.embedding_multiplier)
        run = self._layers[:layers]
        return run_layers(run, self._norm, x, caches, [steps[group] for group in self.layer_groups], taps)

    def logits(self, hidden: Tensor) -> Logits:
        return self._embedding.logits(hidden)


class _Layer:
    def __init__(self, config: ModelConfig, kind: LayerType, weights: Weights, place: str, kernels: Kernels) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.norm = RMSNorm(weights, f"{place}.input_layernorm", size, eps, kernels)
        self._mixer: Attention | MambaMixer
        if kind == "mamba":
            self._mixer = MambaMixer(config, weights, f"{place}.mamba", kernels)
        else:
            self._mixer = Attention(config, weights, f"{place}.self_attn", kernels)
        self._mlp_norm = RMSNorm(weights, f"{place}.post_attention_layernorm", size, eps, kernels)
        self._mlp = GatedMLP(config, weights, f"{place}.shared_mlp", kernels, fused=True)
        self._multiplier = config.residual_multiplier
        self._kernels = kernels

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        scale, factor = self._kernels.scale, self._multiplier
        x, normed = self._mlp_norm.of_sum(x, scale(self._mixer(normed, cache, step), factor))
        return next_norm.of_sum(x, scale(self._mlp(normed), factor))
