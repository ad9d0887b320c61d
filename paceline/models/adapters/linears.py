"""The seam between linear layers and adapters. A layer gets the adapters of its rows from the pass under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.adapters import AdaptedLayer, AdapterKernels


@dataclass(slots=True)
class PassAdapters:
    """The adapters of the rows of the pass under way, or of the rows whose logits are computed. All linear layers of a
    model share it.
    """

    rows: Tensor | None = None
    """int64 [tokens]: see `AttentionBatch.adapters`."""


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The adapters of one linear layer."""

    layer: AdaptedLayer
    passing: PassAdapters
    kernels: AdapterKernels

    @property
    def changes(self) -> bool:
        """Whether adapters of this layer are in slots, and rows of the pass have adapters."""
        return self.passing.rows is not None and any(part is not None for part in self.layer.parts)

    def add(self, y: Tensor, x: Tensor) -> None:
        """Add the adapters of all rows to y [tokens, out], the layer's result for x [tokens, in], in place."""
        if self.passing.rows is not None:
            self.kernels.adapt(y, x, self.layer, self.passing.rows)


class Adaptable(Protocol):
    """A linear layer that may have adapters."""

    adapters: LayerAdapters | None
    """None if the model takes no adapters."""
    bias: Tensor | None
    """[out]"""

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""

    def products(self, rows: Tensor, kernels: AdapterKernels) -> Tensor:
        """Return the products of rows [n, in] with the layer's matrix: [n, out]."""


@dataclass(frozen=True, slots=True)
class NamedLinear:
    """A linear layer, and the rows of the checkpoint's matrix of which it is made."""

    name: str
    """Name of the module in the checkpoint; several layers may be parts of one module."""
    linear: Adaptable
    size_in: int
    outputs: Sequence[int]
    """[outputs of the layer]: the output of the module that each of the layer's outputs is."""
    module_outputs: int
    """Number of outputs of the whole module."""


@dataclass(slots=True)
class NamedLinears:
    """The linear layers of a model with their names, which are noted while the model takes its weights."""

    layers: list[NamedLinear] = field(default_factory=list)

    def note(
        self,
        name: str,
        linears: Sequence[Adaptable],
        size_in: int,
        sizes_out: Sequence[int],
        order: Sequence[int] | None = None,
    ) -> None:
        """Note the layers that one matrix [sum(sizes_out), size_in] becomes.

        Args:
            order: the order of the matrix's outputs in the layers; None keeps the checkpoint's order.
        """
        whole = sum(sizes_out)
        places, begin = range(whole) if order is None else order, 0
        for linear, size in zip(linears, sizes_out, strict=True):
            self.layers.append(NamedLinear(name, linear, size_in, places[begin : begin + size], whole))
            begin += size
