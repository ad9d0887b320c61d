"""Llama 2 and 3, SmolLM 2 and 3, Mistral, Ministral, Qwen 2 and 3: all have the same layers."""

from __future__ import annotations

from collections.abc import Callable

from paceline.kernels.interface import Kernels, NormKind
from paceline.models.base import Weights
from paceline.models.blocks import Attention, GatedMLP
from paceline.models.decoder import Decoder
from paceline.models.layers import MLP, PreNormLayer
from paceline.models.model_config import ModelConfig

MakeMLP = Callable[[int, str], MLP]
"""A function that makes the MLP of a layer from its number and the prefix of its tensors' names."""


class Llama(Decoder):
    """A Llama model, or a model that differs from Llama only in its configuration: norms before attention and MLP.

    Args:
        head_norms: queries and keys have norms over each head (Qwen 3).
        make_mlp: makes the MLP of each layer; None for gated MLPs.
        norm_kind: kind of the norms before attention and MLP, and after the last layer.
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
        def make_gated(layer: int, place: str) -> GatedMLP:
            return GatedMLP(config, weights, place, kernels)

        def make_layer(layer: int, place: str) -> PreNormLayer:
            kind, norms = config.layer_types[layer], NormKind.ROUNDED if head_norms else None
            attention = Attention(config, kind, weights, f"{place}.self_attn", kernels, norms)
            mlp = (make_mlp or make_gated)(layer, f"{place}.mlp")
            return PreNormLayer(config, weights, place, kernels, attention, mlp, norm_kind)

        super().__init__(config, weights, kernels, make_layer, norm_kind, config.embedding_multiplier)
