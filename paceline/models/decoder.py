"""The frame that all architectures share: an embedding, layers one after another, a norm and a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.kernels.interface import AnyCache, AttentionBatch, Kernels, Logits, Taps
from paceline.models.base import Weights, kv_groups
from paceline.models.blocks import AttentionStep, Embedding, Layer, RMSNorm, run_layers
from paceline.models.model_config import LayerType, ModelConfig
from paceline.models.rotary import Rotary

MakeLayer = Callable[[LayerType, str], Layer]
"""A function that makes a layer of a type, with the prefix of its tensors' names."""


class Decoder:
    """A decoder of transformer layers; see `Model`. An architecture is a subclass that says how to make a layer.

    Args:
        unit_offset: see `RMSNorm`, for the norm after the last layer.
        embedding_scale: factor on the embeddings.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        make_layer: MakeLayer,
        unit_offset: bool = False,
        embedding_scale: float = 1.0,
    ) -> None:
        self.config = config
        self.group_shapes, self.layer_groups = kv_groups(config)
        self._embedding = Embedding(config, weights, kernels)
        self._embedding_scale = embedding_scale
        self._layers = [make_layer(kind, f"model.layers.{layer}") for layer, kind in enumerate(config.layer_types)]
        self._norm = RMSNorm(weights, "model.norm", config.hidden_size, config.norm_eps, kernels, unit_offset)
        self._rotary = Rotary(config, self._embedding.device, kernels)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[AnyCache],
        batch: AttentionBatch,
        layers: int | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        rotations = self._rotary(positions)
        steps = [
            AttentionStep(rotations.get(kind), batch, batch.groups[group])
            for kind, group in zip(self.config.layer_types, self.layer_groups)
        ]
        x = self._embedding.embed(token_ids, self._embedding_scale)
        return run_layers(self._layers[:layers], self._norm, x, caches, steps, taps)

    def logits(self, hidden: Tensor) -> Logits:
        return self._embedding.logits(hidden)
