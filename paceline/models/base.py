"""What the engine sees of a model, and what a model sees of its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from paceline.core.kv_layout import GroupShape, state_groups
from paceline.kernels.interface import AnyCache, AttentionBatch, Kernels, Logits, PackedWeight
from paceline.models.model_config import ModelConfig


class Weights(Protocol):
    """The tensors of a checkpoint, each taken once by the block that owns it."""

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, on the model's device and in its dtype. A tensor that is missing or has another
        shape is reported when all have been taken."""

    def take_packed(self, name: str, *shape: int) -> PackedWeight:
        """A matrix likewise, as the model's kernels pack it."""

    def take_packed_parts(self, name: str, sizes_out: Sequence[int], size_in: int) -> list[PackedWeight]:
        """A matrix [sum(sizes_out), size_in] in parts, each packed by itself."""


@dataclass(slots=True)
class Taps:
    """Takes hidden states out of a forward pass, for drafters that were trained on them."""

    depths: tuple[int, ...] = ()
    """Behind how many layers; 0 is the embedding."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """[tokens, hidden] of each depth, as the next layer receives it."""

    def see(self, depth: int, x: Tensor) -> None:
        if depth in self.depths:
            self.states[depth] = x


class Model(Protocol):
    """An architecture with its weights. Call it under `torch.inference_mode()`."""

    config: ModelConfig
    group_shapes: tuple[GroupShape, ...]
    """The KV groups; index into `AttentionBatch.groups`."""
    layer_groups: tuple[int, ...]
    """Group of each layer."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[AnyCache],
        batch: AttentionBatch,
        layers: int | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Computes the tokens of one step and stores their KV.

        Args:
            token_ids, positions: int64 [tokens].
            caches: one a layer.
            layers: run only the first so many; None runs all.
            taps: receive hidden states on the way.

        Returns:
            hidden states behind the final norm, [tokens, hidden] in the model's dtype.
        """

    def logits(self, hidden: Tensor) -> Logits:
        """What may come behind each of hidden [n, hidden]."""


class CompiledModel:
    """A model whose forward pass runs as its kernels like it best. See `Model`."""

    def __init__(self, model: Model, kernels: Kernels) -> None:
        self.config = model.config
        self.group_shapes = model.group_shapes
        self.layer_groups = model.layer_groups
        self.logits = model.logits
        compiles = kernels.compiles_states or not any(shape.state for shape in model.group_shapes)
        self._compiled, self._plain = kernels.compile(model.forward) if compiles else model.forward, model.forward

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[AnyCache],
        batch: AttentionBatch,
        layers: int | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        if taps is not None and taps.depths:  # a compiled pass has no hidden states to show on its way
            return self._plain(token_ids, positions, caches, batch, layers, taps)
        return self._compiled(token_ids, positions, caches, batch, layers)


def kv_groups(config: ModelConfig) -> tuple[tuple[GroupShape, ...], tuple[int, ...]]:
    """The groups of a model whose layers differ in their type alone, and each layer's group."""
    kinds = sorted({kind for kind in config.layer_types if kind != "mamba"}, reverse=True)
    shapes = tuple(
        GroupShape(
            name=kind,
            layers=tuple(layer for layer, own in enumerate(config.layer_types) if own == kind),
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=config.sliding_window if kind == "sliding" else 0,
        )
        for kind in kinds
    )
    if (mamba := config.mamba) is not None:
        layers = [layer for layer, kind in enumerate(config.layer_types) if kind == "mamba"]
        state = ((mamba.heads, mamba.head_dim, mamba.state_size), (mamba.conv_taps - 1, mamba.conv_channels))
        shapes += state_groups("mamba", layers, state, shapes)
    group_of = {layer: index for index, shape in enumerate(shapes) for layer in shape.layers}
    return shapes, tuple(group_of[layer] for layer in range(config.num_layers))
