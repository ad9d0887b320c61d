"""What adapters need to know of the model's own matrices, read from the packed matrices by products with them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.kernels.adapters import AdapterKernels
from paceline.models.adapters.linears import NamedLinear

_ROWS = 256
"""Columns of a matrix that are read at once."""


class BaseWeights:
    """The matrices of a model's linear layers, for one thread beside the one that computes.

    Args:
        kernels: the model's kernels.
    """

    def __init__(self, kernels: AdapterKernels) -> None:
        self._shared = kernels
        self._kernels: AdapterKernels | None = None
        self._squares: dict[int, Tensor] = {}

    def products(self, named: NamedLinear, rows: Tensor) -> Tensor:
        """Return the products of rows [n, in] with a layer's matrix, without its bias: fp64 [n, out] on the CPU."""
        if self._kernels is None:  # few adapters need products
            self._kernels = self._shared.aside()
        return named.linear.products(rows, self._kernels).double().cpu()

    def squares(self, named: NamedLinear) -> Tensor:
        """Return the sum of the squares of the matrix's row of each output: fp64 [out] on the CPU.

        The first call for a layer reads the whole matrix, which takes as long as a prompt of `in` tokens. Later calls
        remember the sums.
        """
        key = id(named.linear)
        if key not in self._squares:
            self._squares[key] = sum(
                (columns.square().sum(0) for _, columns in self._columns(named)),
                torch.zeros(len(named.outputs), dtype=torch.float64),
            )
        return self._squares[key]

    def is_matrix(self, named: NamedLinear, matrix: Tensor) -> bool:
        """Return whether a module's matrix [out, in] is that of the model, which has all of the module's outputs."""
        own = matrix.T[:, list(named.outputs)].to(named.linear.dtype)
        return all(
            torch.equal(columns, own[first : first + len(columns)].double()) for first, columns in self._columns(named)
        )

    def _columns(self, named: NamedLinear) -> Iterator[tuple[int, Tensor]]:
        """Yield the columns of a layer's matrix, with the number of the first one: fp64 [columns, out]."""
        for first in range(0, named.size_in, _ROWS):
            rows = torch.eye(min(_ROWS, named.size_in - first), named.size_in - first)
            yield first, self.products(named, torch.nn.functional.pad(rows, (first, 0)))
