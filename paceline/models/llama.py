"""Llama 2 and 3, SmolLM 2 and 3, Mistral, Ministral, Qwen 2 and 3: all have the same layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from paceline.kernels.caches import AnyCache
from paceline.kernels.interface import Kernels, NormKind
from paceline.models.base import Weights
from paceline.models.blocks import Attention, AttentionStep, GatedMLP, RMSNorm
from paceline.models.decoder import Decoder
from paceline.models.model_config import LayerType, ModelConfig

MakeMLP = Callable[[str], Callable[[Tensor], Tensor]]


class Llama(Decoder):
    """A Llama model, or one that differs in its configuration only: norms before attention and MLP.

    Args:
        head_norms: queries and keys have norms over each head (Qwen 3).
        make_mlp: makes what a layer has in place of a gated MLP, from the prefix of its tensors' names.
        norm_kind: of the norms before attention and MLP, and after the last layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        head_norms: bool = False,
        make_mlp: MakeMLP | None = None,
        norm_kind: NormKind = NormKind.ROUNDED,
    ) -> None:
        def make_gated(place: str) -> GatedMLP:
            return GatedMLP(config, weights, place, kernels)

        def make_layer(kind: LayerType, place: str) -> _Layer:
            return _Layer(config, kind, weights, place, kernels, head_norms, make_mlp or make_gated, norm_kind)

        super().__init__(config, weights, kernels, make_layer, norm_kind)


class _Layer:
    def __init__(
        self,
        config: ModelConfig,
        kind: LayerType,
        weights: Weights,
        place: str,
        kernels: Kernels,
        head_norms: bool,
        make_mlp: MakeMLP,
        norm_kind: NormKind,
    ) -> None:
        norm = partial(RMSNorm, size=config.hidden_size, eps=config.norm_eps, kernels=kernels, kind=norm_kind)
        head_kind = NormKind.ROUNDED if head_norms else None
        self.norm = norm(weights, f"{place}.input_layernorm")
        self._attention = Attention(config, kind, weights, f"{place}.self_attn", kernels, head_kind)
        self._mlp_norm = norm(weights, f"{place}.post_attention_layernorm")
        self._mlp = make_mlp(f"{place}.mlp")

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        x, normed = self._mlp_norm.of_sum(x, self._attention(normed, cache, step))
        return next_norm.of_sum(x, self._mlp(normed))
