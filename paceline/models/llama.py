"""LlamaForCausalLM: Llama 2 and 3, SmolLM2 and others of its shape."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.kernels.interface import AttentionBatch, Kernels, LayerCache
from paceline.models.base import Taps, Weights, kv_groups
from paceline.models.blocks import Attention, AttentionStep, GatedMLP, RMSNorm, Rotary, Vocabulary
from paceline.models.config import ModelConfig


class Llama:
    """Norm before attention and MLP, every layer sees the whole context. See `Model`."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        self.config = config
        self.group_shapes, self.layer_groups = kv_groups(config)
        self._vocabulary = Vocabulary(config, weights, kernels)
        self._layers = [_Layer(config, weights, f"model.layers.{layer}", kernels) for layer in range(config.num_layers)]
        self._norm = RMSNorm(weights, "model.norm", config.hidden_size, config.norm_eps, kernels)
        self._rotary = Rotary(config.rope, config.head_dim, self._vocabulary.device, kernels)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache],
        batch: AttentionBatch,
        layers: int | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        step = AttentionStep(self._rotary(positions), batch, batch.groups[0])
        x = self._vocabulary.embed(token_ids)
        taps = taps or Taps()
        for depth, (layer, cache) in enumerate(zip(self._layers[:layers], caches)):
            taps.see(depth, x)
            x = layer(x, cache, step)
        taps.see(self.config.num_layers if layers is None else layers, x)
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._vocabulary.logits(hidden)


class _Layer:
    def __init__(self, config: ModelConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self._attention_norm = RMSNorm(weights, f"{place}.input_layernorm", size, eps, kernels)
        self._attention = Attention(config, weights, f"{place}.self_attn", kernels)
        self._mlp_norm = RMSNorm(weights, f"{place}.post_attention_layernorm", size, eps, kernels)
        self._mlp = GatedMLP(config, weights, f"{place}.mlp", kernels)
        self._add = kernels.add

    def __call__(self, x: Tensor, cache: LayerCache, step: AttentionStep) -> Tensor:
        x = self._add(x, self._attention(self._attention_norm(x), cache, step))
        return self._add(x, self._mlp(self._mlp_norm(x)))
