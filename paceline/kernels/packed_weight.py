"""A matrix in the layout of a backend of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Allocate = Callable[[int], Tensor]
"""A function that returns memory of a given size: uint8 [size], aligned to a cache line, with any content."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [size_out, size_in] in the layout that its backend reads fastest. It does not refer to the matrix from
    which it was packed.
    """

    data: Tensor
    """The packed matrix, in the backend's own layout."""
    size_out: int
    size_in: int
    dtype: torch.dtype
    """The dtype in which kernels compute with it."""
    format: int | None = None
    """The backend's number for the layout of a quantized or compressed matrix; None for other matrices."""
    heads: int | None = None
    """Number of matrices, one for each head, for `linear_heads`; None for one matrix."""
