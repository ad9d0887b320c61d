"""Gemma3ForCausalLM: the text model of Gemma 3."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from paceline.kernels.interface import AnyCache, AttentionBatch, Kernels, Logits, Taps
from paceline.models.base import Weights, kv_groups
from paceline.models.blocks import Attention, AttentionStep, Embedding, GatedMLP, RMSNorm, Rotary, run_layers
from paceline.models.model_config import ModelConfig


class Gemma3:
    """A Gemma 3 model: norms before and after attention and MLP. Most layers attend to a window only and rotate faster.

    See `Model`.
    """

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        self.config = config
        self.group_shapes, self.layer_groups = kv_groups(config)
        self._embedding = Embedding(config, weights, kernels)
        self._layers = [_Layer(config, weights, f"model.layers.{layer}", kernels) for layer in range(config.num_layers)]
        self._norm = RMSNorm(weights, "model.norm", config.hidden_size, config.norm_eps, kernels, unit_offset=True)
        ropes = {"full": config.rope, "sliding": config.sliding_rope}
        self._rotaries = [
            Rotary(ropes[shape.name], config.head_dim, self._embedding.device, kernels) for shape in self.group_shapes
        ]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[AnyCache],
        batch: AttentionBatch,
        layers: int | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        steps = [AttentionStep(rotary(positions), batch, group) for rotary, group in zip(self._rotaries, batch.groups)]
        x = self._embedding.embed(token_ids, scale=self.config.hidden_size**0.5)
        run = self._layers[:layers]
        return run_layers(run, self._norm, x, caches, [steps[group] for group in self.layer_groups], taps)

    def logits(self, hidden: Tensor) -> Logits:
        return self._embedding.logits(hidden)


class _Layer:
    def __init__(self, config: ModelConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        norm = partial(RMSNorm, size=config.hidden_size, eps=config.norm_eps, kernels=kernels, unit_offset=True)
        self.norm = norm(weights, f"{place}.input_layernorm")
        self._attention = Attention(config, weights, f"{place}.self_attn", kernels, qk_norm=True)
        self._post_attention = norm(weights, f"{place}.post_attention_layernorm")
        self._pre_mlp = norm(weights, f"{place}.pre_feedforward_layernorm")
        self._mlp = GatedMLP(config, weights, f"{place}.mlp", kernels)
        self._post_mlp = norm(weights, f"{place}.post_feedforward_layernorm")

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        x, normed = self._pre_mlp.of_sum(x, self._post_attention(self._attention(normed, cache, step)))
        return next_norm.of_sum(x, self._post_mlp(self._mlp(normed)))
