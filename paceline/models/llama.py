"""LlamaForCausalLM: Llama 2 and 3, SmolLM2 and others with this architecture."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.kernels.interface import AnyCache, AttentionBatch, Kernels, Logits, Taps
from paceline.models.base import Weights, kv_groups
from paceline.models.blocks import Attention, AttentionStep, Embedding, GatedMLP, RMSNorm, Rotary, run_layers
from paceline.models.model_config import ModelConfig


class Llama:
    """A Llama model: norms before attention and MLP; every layer attends to the whole context. See `Model`."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        self.config = config
        self.group_shapes, self.layer_groups = kv_groups(config)
        self._embedding = Embedding(config, weights, kernels)
        self._layers = [_Layer(config, weights, f"model.layers.{layer}", kernels) for layer in range(config.num_layers)]
        self._norm = RMSNorm(weights, "model.norm", config.hidden_size, config.norm_eps, kernels)
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
        step = AttentionStep(self._rotary(positions), batch, batch.groups[0])
        x = self._embedding.embed(token_ids)
        run = self._layers[:layers]
        return run_layers(run, self._norm, x, caches, [step] * len(run), taps)

    def logits(self, hidden: Tensor) -> Logits:
        return self._embedding.logits(hidden)


class _Layer:
    def __init__(self, config: ModelConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.norm = RMSNorm(weights, f"{place}.input_layernorm", size, eps, kernels)
        self._attention = Attention(config, weights, f"{place}.self_attn", kernels)
        self._mlp_norm = RMSNorm(weights, f"{place}.post_attention_layernorm", size, eps, kernels)
        self._mlp = GatedMLP(config, weights, f"{place}.mlp", kernels)

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        x, normed = self._mlp_norm.of_sum(x, self._attention(normed, cache, step))
        return next_norm.of_sum(x, self._mlp(normed))
