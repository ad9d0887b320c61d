"""The interfaces of a model: to the engine, and to its checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.kv_groups import divide_groups, state_groups
from paceline.core.kv_layout import GroupShape
from paceline.kernels.interface import ForwardInputs, Logits
from paceline.kernels.packed_weight import PackedWeight
from paceline.models.model_config import LayerType, ModelConfig, ModelFacts


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The shape of a tensor [experts, sum(sizes_out), size_in] that holds matrices of all experts."""

    experts: int
    sizes_out: tuple[int, ...]
    """Outputs of each part: gate and up, or only down."""
    size_in: int
    transposed: bool = False
    """Whether the tensor is [experts, size_in, sum(sizes_out)] instead."""
    interleaved: bool = False
    """Whether output i belongs to part i % parts. Otherwise the parts follow each other."""

    @property
    def shape(self) -> tuple[int, int, int]:
        out = sum(self.sizes_out)
        return (self.experts, self.size_in, out) if self.transposed else (self.experts, out, self.size_in)

    def outputs(self) -> list[slice]:
        """Return the outputs of each part in one expert's matrix [sum(sizes_out), size_in]."""
        count = len(self.sizes_out)
        if self.interleaved:
            return [slice(part, None, count) for part in range(count)]
        return [slice(end - size, end) for size, end in zip(self.sizes_out, itertools.accumulate(self.sizes_out))]

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Return the parts [size_out, size_in] of one expert's matrix, as views."""
        matrix = matrix.T if self.transposed else matrix
        return [matrix[outputs] for outputs in self.outputs()]


class Weights(Protocol):
    """The tensors of a checkpoint, each taken once by the block that owns it."""

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor of this name, on the model's device, in this dtype or else in the model's.

        A tensor that is missing or has another shape is reported after all tensors have been taken.
        """

    def take_packed(self, name: str, *shape: int, order: Sequence[int] | None = None) -> PackedWeight:
        """Return the matrix of this name as the model's kernels pack it, with its rows in `order` if that is given."""

    def take_packed_parts(
        self, name: str, sizes_out: Sequence[int], size_in: int, order: Sequence[int] | None = None
    ) -> list[PackedWeight]:
        """Return the parts of a matrix [sum(sizes_out), size_in], each packed by itself.

        Args:
            order: the order of the matrix's rows in the parts; None keeps the checkpoint's order.
        """

    def take_packed_derived(
        self, name: str, shape: tuple[int, ...], derive: Sequence[Callable[[Tensor], Tensor]]
    ) -> list[PackedWeight]:
        """Return the matrices that functions make of the tensor of this name, each packed by itself.

        Args:
            derive: functions that return a matrix [out, in], or the matrices of all heads [heads, out, in]. They may
                get a tensor on the meta device.
        """

    def has(self, name: str, *shape: int) -> bool:
        """Return whether the checkpoint has a tensor of this name that was not taken.

        Args:
            shape: the shape that it must have; empty for any.
        """

    def is_one_matrix(self, name: str, other: str) -> bool:
        """Return whether the checkpoint has at most one of two matrices, or has both with the same values.

        In the last case, both are read whole.
        """

    def take_packed_experts(self, name: str, shape: FusedExperts) -> list[list[PackedWeight]]:
        """Return the matrices of a tensor that holds those of all experts, each packed by itself: [part][expert]."""

    def take_table(self, name: str, rows: int, size: int) -> Tensor:
        """Return the matrix of this name as the checkpoint has it: mapped, in its own dtype, not on the device."""


PADDING = 0
"""Token id that stands in for placeholder tokens of media, whose own ids may lie outside of the vocabulary. A row of an
encoding replaces the token's embedding, but not its rows of other tables.
"""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of encodings that a step reads in place of the embeddings of placeholder tokens."""

    places: Tensor
    """int64 [rows]: the placeholder tokens, as indices into the tokens of the step."""
    values: Tensor
    """[rows, encoding_size], in the model's dtype and on its device."""
    positions: Tensor | None = None
    """int64 [3, rows]: frame, row and column of these tokens as positions; None if positions have one dimension."""


class _Parts(Protocol):
    """The attributes of a model that both the engine and the loader read."""

    @property
    def config(self) -> ModelFacts: ...

    group_shapes: tuple[GroupShape, ...]
    """The KV groups; index into `AttentionBatch.groups`."""
    layer_groups: tuple[int, ...]
    """The group of each layer, as an index into `group_shapes`."""

    def logits(self, hidden: Tensor) -> Logits:
        """Return the logits of the token after each of hidden [n, hidden]."""


class Architecture(_Parts, Protocol):
    """A model file's class: an architecture with its weights. Its kernels may compile its forward pass."""

    config: ModelConfig
    unread: Sequence[str]
    """Beginnings of the names of tensors that a checkpoint may have and that the model does not read."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the first layer's input for int64 token_ids [tokens]: [tokens, hidden]."""

    def lookups(self, token_ids: Tensor, begin: int, layers: int | None) -> Sequence[Tensor]:
        """Return the rows that layers [begin, layers) read for these tokens from tables outside of the device.

        The result is [tokens, ...] for each table, on the device of int64 token_ids [tokens].
        """

    def encoded_inputs(self, token_ids: Tensor, positions: Tensor, encoded: EncodedRows) -> Sequence[Tensor]:
        """Return the inputs of a pass over tokens, some of which have rows of encodings: the first layer's input
        [tokens, hidden], and all other tensors [tokens, ...] that such a pass does not compute itself.

        Args:
            token_ids: int64 [tokens], with `PADDING` for placeholders.
            positions: int64 [tokens], with any positions for placeholders that have three.
        """

    def forward(self, inputs: ForwardInputs, embedded: bool = False) -> Tensor:
        """Compute the tokens of one step and store their KV.

        Args:
            inputs: with `further` as the result of `lookups`, and, if `begin` is not 0, the hidden states after `begin`
                layers.
            embedded: whether `further` begins with the result of `encoded_inputs`. Otherwise the first layer's input is
                the result of `embed`.

        Returns:
            Hidden states after the final norm, [tokens, hidden] in the model's dtype.
        """


class Model(_Parts, Protocol):
    """A model as the engine uses it. Call it under `torch.inference_mode()`."""

    def forward(
        self, inputs: ForwardInputs, wanted: Sequence[int] | None = None, encoded: EncodedRows | None = None
    ) -> Tensor:
        """Compute the tokens of one step from the first layer on, and store their KV.

        Args:
            wanted: [requests]: number of last tokens of each request whose result is wanted; None wants all tokens.
                Other tokens stop before the layers at the model's end that have no KV of their own.
            encoded: rows that some tokens have in place of their embeddings; None if all tokens have their own.

        Returns:
            Hidden states after the final norm, [wanted tokens, hidden] in the model's dtype.
        """


def kv_groups(config: ModelConfig) -> tuple[tuple[GroupShape, ...], tuple[int, ...]]:
    """Return the KV groups of a model whose layers differ only in their type, and the group index of each layer.

    A layer that reads another layer's KV is a reader in the other layer's group.
    """
    kinds = sorted({kind for kind in config.layer_types if kind in config.attention}, reverse=True)
    sources = config.kv_sources
    storing = [layer for layer in range(config.num_layers) if layer not in sources]
    # Layers of two types whose caches have the same shape are one group.
    by_cache: dict[tuple[int, int, int, int], list[LayerType]] = {}
    for kind in kinds:
        attention = config.attention[kind]
        planes = 2 if attention.latent is None else 1
        by_cache.setdefault((attention.num_kv_heads, attention.head_dim, attention.window, planes), []).append(kind)
    shapes = tuple(
        GroupShape(
            name="-".join(own_kinds),
            layers=tuple(layer for layer in storing if config.layer_types[layer] in own_kinds),
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=window,
            planes=planes,
            readers=tuple(pair for pair in sources.items() if config.layer_types[pair[1]] in own_kinds),
        )
        for (kv_heads, head_dim, window, planes), own_kinds in by_cache.items()
    )
    if recurrent := [layer for layer, kind in enumerate(config.layer_types) if kind not in config.attention]:
        shapes += state_groups(config.layer_types[recurrent[0]], recurrent, _state_parts(config), shapes)
    else:
        shapes = divide_groups(shapes)
    group_of = {layer: index for index, shape in enumerate(shapes) for layer in (*shape.layers, *dict(shape.readers))}
    return shapes, tuple(group_of[layer] for layer in range(config.num_layers))


def _state_parts(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the parts of a recurrent layer's state, without room for drafts."""
    if (delta := config.delta) is not None:
        inputs = delta.conv_channels + 2 * delta.heads
        convolved = (delta.conv_taps - 1, delta.conv_channels)
        return (delta.heads, delta.key_dim, delta.value_dim), (1, inputs), convolved
    mamba = config.mamba
    assert mamba is not None
    inputs, convolved = mamba.conv_channels + mamba.heads, (mamba.conv_taps - 1, mamba.conv_channels)
    return (mamba.heads, mamba.head_dim, mamba.state_size), (1, inputs), convolved
