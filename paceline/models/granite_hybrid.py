"""GraniteMoeHybridForCausalLM without experts: the dense hybrids of Granite 4."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.kernels.interface import AnyCache, AttentionBatch, Kernels, Logits
from paceline.models.base import Taps, Weights, kv_groups
from paceline.models.blocks import Attention, AttentionStep, GatedMLP, MambaMixer, RMSNorm, Rotary, Vocabulary
from paceline.models.model_config import LayerType, ModelConfig


class GraniteHybrid:
    """Most layers have a Mamba-2 mixer, a few see the whole context, as a rule without positions. See `Model`."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        self.config = config
        self.group_shapes, self.layer_groups = kv_groups(config)
        self._vocabulary = Vocabulary(config, weights, kernels)
        self._layers = [
            _Layer(config, kind, weights, f"model.layers.{layer}", kernels)
            for layer, kind in enumerate(config.layer_types)
        ]
        self._norm = RMSNorm(weights, "model.norm", config.hidden_size, config.norm_eps, kernels)
        self._rotary: Rotary | None = None
        if config.rotates:
            self._rotary = Rotary(config.rope, config.head_dim, self._vocabulary.device, kernels)

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
        x = self._vocabulary.embed(token_ids, scale=self.config.embedding_multiplier)
        taps = taps or Taps()
        run = self._layers[:layers]
        # What a layer adds to the residual stream is normed for whoever reads it next in the same pass.
        norms = [*(layer.norm for layer in run), self._norm]
        normed = norms[0](x)
        for depth, (layer, cache, group, next_norm) in enumerate(zip(run, caches, self.layer_groups, norms[1:])):
            taps.see(depth, x)
            x, normed = layer(x, normed, next_norm, cache, steps[group])
        taps.see(self.config.num_layers if layers is None else layers, x)
        return normed

    def logits(self, hidden: Tensor) -> Logits:
        return self._vocabulary.logits(hidden)


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
        """x and `norm` of it -> x behind the layer, and `next_norm` of that."""
        scale, factor = self._kernels.scale, self._multiplier
        x, normed = self._mlp_norm.of_sum(x, scale(self._mixer(normed, cache, step), factor))
        return next_norm.of_sum(x, scale(self._mlp(normed), factor))
