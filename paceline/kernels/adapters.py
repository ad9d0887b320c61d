"""Low-rank adapters (LoRA) of linear layers, as kernels see them.

An adapter adds scale * (up (down x) + bias) to the output of a linear layer, and may multiply the output before. Each
row of a batch has an adapter of its own, or none: it names the adapter by a slot. `AdapterTable` has the adapters in
the slots, for all layers of a model.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from paceline.kernels.packed_weight import PackedWeight

MOST_RANK = 512
"""Largest rank of an adapter; `kMostRank` of native/src/adapters.h."""
FIELDS = 6
"""Numbers of a slot in `AdaptedLayer.slots`: addresses of `down`, `up`, `bias` and `factors`, the rank, and the bits of
`scale`.
The native and Triton kernels read them in this order.
"""


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter's part for one linear layer. Tensors are contiguous. But for `factors` they have one dtype, bf16 or
    fp32.
    """

    down: Tensor
    """[rank, in]"""
    up: Tensor
    """[rank, out]: transposed, because kernels add rows of it."""
    scale: float
    bias: Tensor | None = None
    """[out]; None if the adapter has none."""
    factors: Tensor | None = None
    """fp32 [out]: factors of the layer's own output (DoRA); None if all are 1."""

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        yield from (own for own in (self.down, self.up, self.bias, self.factors) if own is not None)

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        return all(bool(own.isfinite().all()) for own in self._tensors())

    def to(self, device: torch.device) -> LowRank:
        bias, factors = (None if own is None else own.to(device) for own in (self.bias, self.factors))
        return LowRank(self.down.to(device), self.up.to(device), self.scale, bias, factors)

    def numbers(self) -> list[int]:
        """Return the `FIELDS` that describe this part to kernels."""
        bias, factors = (0 if own is None else own.data_ptr() for own in (self.bias, self.factors))
        (scale,) = struct.unpack("<i", struct.pack("<f", self.scale))
        return [self.down.data_ptr(), self.up.data_ptr(), bias, factors, len(self.down), scale]


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """The adapters of one linear layer."""

    slots: Tensor
    """int64 [slots, FIELDS], on the model's device; 0 where an adapter has no part for this layer."""
    parts: list[LowRank | None]
    """[slots]: the same as tensors."""
    dtype: torch.dtype
    """Dtype of the parts' tensors."""


class AdapterTable:
    """The adapters in the slots of a model's device.

    Args:
        layers: number of linear layers that may have adapters.
        slots: largest number of adapters in one batch.
        dtype: dtype of the adapters' tensors.
    """

    def __init__(self, layers: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numbers = torch.zeros(layers, slots, FIELDS, dtype=torch.int64, device=device)
        self._device = device
        self.layers = [AdaptedLayer(numbers, [None] * slots, dtype) for numbers in self._numbers]

    def place(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        """Put an adapter into a slot, in place of the one that is there. No pass may run meanwhile.

        Args:
            parts: [layers]: the adapter's part for each layer.
        """
        numbers = []
        for layer, part in zip(self.layers, parts, strict=True):
            own = None if part is None else part.to(self._device)
            layer.parts[slot] = own
            numbers.append([0] * FIELDS if own is None else own.numbers())
        self._numbers[:, slot] = torch.tensor(numbers, dtype=torch.int64).to(self._device)


class AdapterKernels(Protocol):
    """The operation of adapters. A row's result depends on no other row."""

    def adapt(self, y: Tensor, x: Tensor, layer: AdaptedLayer, rows: Tensor) -> None:
        """Add the adapters' products with x [tokens, in] to y [tokens, out], in place. Sums are in fp32.

        If an adapter has factors, y is multiplied by them before.

        Args:
            y: the result of `linear` for x, rounded as without adapters; the sum is rounded once more.
            rows: int64 [tokens]: the slot of each row's adapter, -1 for none.
        """

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`."""

    def aside(self) -> AdapterKernels:
        """Return kernels that read the same packed matrices, and that another thread may use at the same time."""


class TorchAdapters:
    """`AdapterKernels` in plain torch."""

    def aside(self) -> Self:
        return self

    def adapt(self, y: Tensor, x: Tensor, layer: AdaptedLayer, rows: Tensor) -> None:
        # One row at a time, so that its result cannot depend on the batch.
        for row, slot in enumerate(rows.tolist()):
            if slot >= 0 and (part := layer.parts[slot]) is not None:
                added = x[row].float() @ part.down.float().T * part.scale @ part.up.float()
                if part.bias is not None:
                    added += part.bias.float() * part.scale
                factors = 1.0 if part.factors is None else part.factors
                y[row] = (y[row].float() * factors + added).to(y.dtype)
