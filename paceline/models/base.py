"""The interfaces of a model: to the engine, and to its checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.kv_coding import NO_CODING, KVCoding
from paceline.core.kv_groups import divide_groups, groups_of_layers, state_groups
from paceline.core.kv_layout import GroupShape
from paceline.kernels.interface import ForwardInputs, Logits
from paceline.kernels.packed_weight import PackedWeight
from paceline.models.adapters.linears import NamedLinears
from paceline.models.model_config import LayerType, ModelConfig, ModelFacts


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The shape of a tensor [experts, sum(sizes_out), size_in] that holds matrices of all experts."""

    experts: int
    sizes_out: tuple[int, ...]
    """Number of outputs of each part. The parts are gate and up, or only down."""
    size_in: int
    transposed: bool = False
    """Whether the last two dimensions are swapped: the tensor is [experts, size_in, sum(sizes_out)]."""
    interleaved: bool = False
    """Whether output i belongs to part i % (number of parts). Otherwise the outputs of each part are together."""

    @property
    def shape(self) -> tuple[int, int, int]:
        out = sum(self.sizes_out)
        return (self.experts, self.size_in, out) if self.transposed else (self.experts, out, self.size_in)

    def outputs(self) -> list[slice]:
        """Return which outputs of one expert's matrix [sum(sizes_out), size_in] belong to each part."""
        count = len(self.sizes_out)
        if self.interleaved:
            return [slice(part, None, count) for part in range(count)]
        return [slice(end - size, end) for size, end in zip(self.sizes_out, itertools.accumulate(self.sizes_out))]

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Return the parts [size_out, size_in] of one expert's matrix, as views."""
        matrix = matrix.T if self.transposed else matrix
        return [matrix[outputs] for outputs in self.outputs()]


class Weights(Protocol):
    """The tensors of a checkpoint. The block of the model that owns a tensor takes it once."""

    linears: NamedLinears
    """The linear layers that have taken their matrices."""

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor with this name on the model's device, in `dtype`; None is the model's dtype.

        A tensor that is missing or has another shape is reported after all tensors have been taken.
        """

    def take_packed(self, name: str, *shape: int, order: Sequence[int] | None = None) -> PackedWeight:
        """Return the matrix with this name, packed by the model's kernels, with its rows in `order`; None keeps their
        order.
        """

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
        """Return the matrices that functions derive from the tensor with this name, each packed by itself.

        Args:
            derive: return a matrix [out, in] or [heads, out, in]; they may get a tensor on the meta device.
        """

    def has(self, name: str, *shape: int) -> bool:
        """Return whether the checkpoint has a tensor with this name that was not taken yet.

        Args:
            shape: the shape that the tensor must have; empty for any shape.
        """

    def is_one_matrix(self, name: str, other: str) -> bool:
        """Return whether the checkpoint has at most one of two matrices, or has both with the same values.

        To compare them, both matrices are read whole.
        """

    def take_packed_experts(self, name: str, shape: FusedExperts) -> list[list[PackedWeight]]:
        """Return the matrices of all experts from one tensor, each packed by itself: [part][expert]."""

    def take_table(self, name: str, rows: int, size: int) -> Tensor:
        """Return the matrix with this name as the checkpoint stores it: mapped from the file, in its own dtype, on the
        CPU.
        """


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
    """int64 [3, rows]: positions of these tokens by frame, row and column; None if positions have one dimension."""


class _Parts(Protocol):
    """The attributes of a model that both the engine and the loader read."""

    @property
    def config(self) -> ModelFacts: ...

    group_shapes: tuple[GroupShape, ...]
    """The KV groups of the model, in the order of `AttentionBatch.groups`."""
    layer_groups: tuple[int, ...]
    """The group of each layer, as an index into `group_shapes`."""

    def code_kv(self, coding: KVCoding) -> None:
        """Choose the groups for keys and values in an 8-bit code, before the first pass.

        Raises ConfigError if keys and values cannot have it.
        """

    def logits(self, hidden: Tensor) -> Logits:
        """Return the logits of the next token for each of the states hidden [n, hidden]."""


class Architecture(_Parts, Protocol):
    """The class that a model file defines: an architecture with its weights. Kernels may compile its forward pass."""

    config: ModelConfig
    unread: Sequence[str]
    """Beginnings of the names of tensors that a checkpoint may have and that the model does not read."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the first layer's input for int64 token_ids [tokens]: [tokens, hidden]."""

    def lookups(self, token_ids: Tensor, begin: int, layers: int | None) -> Sequence[Tensor]:
        """Return the rows that layers [begin, layers) read for these tokens from tables that are not on the device.

        The result is [tokens, ...] for each table, on the device of int64 token_ids [tokens].
        """

    def encoded_inputs(self, token_ids: Tensor, positions: Tensor, encoded: EncodedRows) -> Sequence[Tensor]:
        """Return the inputs of a pass over tokens of which some have rows of encodings: the first layer's input
        [tokens, hidden], then all other tensors [tokens, ...] that the pass needs and does not compute.

        Args:
            token_ids: int64 [tokens], with `PADDING` for placeholders.
            positions: int64 [tokens]; values of placeholders with three positions are ignored.
        """

    def forward(self, inputs: ForwardInputs, embedded: bool = False) -> Tensor:
        """Compute the tokens of one step and store their KV.

        Args:
            inputs: `further` has the result of `lookups`, and, if `begin` > 0, the hidden states after `begin` layers.
            embedded: whether `further` begins with the result of `encoded_inputs`, which then replaces that of `embed`.

        Returns:
            Hidden states after the final norm, [tokens, hidden] in the model's dtype.
        """


class Model(_Parts, Protocol):
    """A model as the engine uses it. Call it under `torch.inference_mode()`."""

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Logits:
        """Return the logits of the next token for each of the states hidden [n, hidden].

        Args:
            adapters: int64 [n]: the slot of each row's adapter, -1 for none; None if no row has one.
        """

    def forward(
        self, inputs: ForwardInputs, wanted: Sequence[int] | None = None, encoded: EncodedRows | None = None
    ) -> Tensor:
        """Compute the tokens of one step from the first layer on, and store their KV.

        Args:
            wanted: [requests]: how many last tokens of each request need a result; None for all tokens.
            encoded: rows in place of the embeddings of some tokens; None if all tokens are embedded.

        Returns:
            Hidden states after the final norm, [wanted tokens, hidden] in the model's dtype.
        """


def kv_groups(config: ModelConfig, coding: KVCoding = NO_CODING) -> tuple[tuple[GroupShape, ...], tuple[int, ...]]:
    """Return the KV groups of a model whose layers differ only in their type, and the group index of each layer.

    A layer that reads another layer's KV is a reader in the other layer's group.

    Args:
        coding: the 8-bit code of keys and values, and its layers. Groups of states fit to it.

    Raises:
        ConfigError: keys and values cannot have this code.
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
    shapes = coding.applied(shapes)
    if recurrent := [layer for layer, kind in enumerate(config.layer_types) if kind not in config.attention]:
        shapes += state_groups(config.layer_types[recurrent[0]], recurrent, _state_parts(config), shapes)
    else:
        shapes = divide_groups(shapes)
    return shapes, groups_of_layers(shapes)


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
