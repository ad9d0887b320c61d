"""Adapters of linear layers by the native library."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.adapters import AdaptedLayer
from paceline.kernels.native.library import TYPES, KernelKind, Op
from paceline.kernels.native.operations import Operations, need, with_dense_rows


class NativeAdapters(Operations):
    """`AdapterKernels` of the native library."""

    def adapt(self, y: Tensor, x: Tensor, layer: AdaptedLayer, rows: Tensor) -> None:
        tokens, size_in, size_out = len(x), x.shape[1], y.shape[1]
        need("the adapted rows", y, x.dtype, tokens, size_out)
        if not y.is_contiguous():
            raise ValueError("the rows to which adapters are added must be contiguous")
        x = with_dense_rows(x)
        op = Op(KernelKind.ADAPT, rows=tokens, n0=size_in, n1=size_out, n2=x.stride(0), format=TYPES[layer.dtype])
        # A recorded pass reads the slots of each step.
        self.run(op, y, (x, layer.slots, None if y.is_meta else rows.contiguous()))
