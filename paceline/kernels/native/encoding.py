"""Operations of encoders in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache
from paceline.kernels.interface import Kernels
from paceline.kernels.native.library import COMPRESSED, KernelKind, Op
from paceline.kernels.native.operations import Operations, need, with_dense_rows
from paceline.kernels.packed_weight import PackedWeight


class NativeEncoding(Operations):
    """The part of `NativeKernels` with operations that only encoders have."""

    def clipped_linear(self, x: Tensor, weight: PackedWeight, bounds: Tensor) -> Tensor:
        need("the bounds", bounds, torch.float32, 4)
        if weight.format not in (None, COMPRESSED):
            raise ValueError("a linear layer with bounds must not be quantized")
        return self.multiply(KernelKind.LINEAR, x, weight, None, x.dtype, bounds)

    def full_attention(self: Kernels, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        rows, seen = len(queries), len(keys)
        # All keys are one block of a cache with one slot, and each query sees the last one.
        own_keys, own_values = (x.contiguous().transpose(0, 1)[None] for x in (keys, values))
        cache = LayerCache(own_keys, own_values)
        nowhere = torch.empty(0, dtype=torch.int64)
        group = GroupTables(seen, 0, torch.zeros(1, 1, dtype=torch.int32), nowhere, nowhere)
        batch = AttentionBatch((0, rows), (seen,), (group,), last_keys=torch.full((rows,), seen - 1))
        return self.attention(queries, cache, batch, group, scale, 0.0, looks_ahead=True)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._layer_norm(x, None, weight, bias, eps)

    def add_layer_norm(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        need("the second operand", y, x.dtype, *x.shape)
        return self._layer_norm(x, y, weight, bias, eps)

    def _layer_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        size = x.shape[-1]
        need("the norm's weight", weight, x.dtype, size)
        if bias is not None:
            need("the norm's bias", bias, x.dtype, size)
        rows = with_dense_rows(x.reshape(-1, size))
        added = None if y is None else y.reshape(-1, size).contiguous()
        out = rows.new_empty(rows.shape)
        op = Op(KernelKind.LAYER_NORM, rows=len(rows), n0=size, n1=rows.stride(0), f0=eps)
        self.run(op, out, (rows, weight, bias, added))
        return out.view(x.shape)

    def gelu(self, x: Tensor) -> Tensor:
        return self._gelu(x, False)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return self._gelu(x, True)

    def _gelu(self, x: Tensor, tanh_form: bool) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape)
        self.run(Op(KernelKind.GELU, rows=x.shape[0], n0=x.shape[1:].numel(), n2=tanh_form), out, (x,))
        return out

    def gelu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.elementwise(KernelKind.GELU_AND_MUL, gate, up)
