"""Modules that compute the matrix products of a `transformers` model with Paceline's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.kernels.interface import Kernels
from paceline.kernels.packed_weight import PackedWeight
from paceline.models.packing.packed import Pack


class PackedLinear(nn.Module):
    """A linear layer: x [..., in] -> [..., out].

    Args:
        weight: the packed matrix. Code that reads the module's `weight` sees a tensor without data.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None, kernels: Kernels) -> None:
        super().__init__()
        self._packed = weight
        self._kernels = kernels
        self.in_features, self.out_features = weight.size_in, weight.size_out
        self.weight = torch.empty(weight.size_out, weight.size_in, dtype=weight.dtype, device="meta")
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        out = self._kernels.linear(x.reshape(-1, self.in_features), self._packed, self.bias)
        return out.view(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """An embedding that shares its matrix with the head."""

    def __init__(self, weight: PackedWeight, kernels: Kernels) -> None:
        super().__init__()
        self._packed = weight
        self._kernels = kernels
        self.weight = torch.empty(weight.size_out, weight.size_in, dtype=weight.dtype, device="meta")

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self._kernels.embed(token_ids.reshape(-1), self._packed)
        return rows.view(*token_ids.shape, -1)


def pack_linears(causal: Any, kernels: Kernels, pack: Pack) -> None:
    """Replace the linear layers of a `transformers` model by packed ones, one after another, to need no memory twice.

    Matrices that several modules share are packed once.

    Args:
        causal: a `PreTrainedModel` with a head.
    """
    from transformers.pytorch_utils import Conv1D

    head_weight = getattr(causal.get_output_embeddings(), "weight", None)
    packed_of: dict[Tensor, PackedWeight] = {}

    def packed(name: str, weight: Tensor, transposed: bool = False) -> PackedWeight:
        if weight not in packed_of:
            matrix = weight.detach()
            packed_of[weight] = pack(f"{name}.weight", matrix.T if transposed else matrix)
        return packed_of[weight]

    for name, module in list(causal.named_modules()):
        new: nn.Module
        if type(module) is nn.Linear and module.weight.numel():
            new = PackedLinear(packed(name, module.weight), _vector(module.bias), kernels)
        elif type(module) is Conv1D:
            new = PackedLinear(packed(name, module.weight, transposed=True), _vector(module.bias), kernels)
        elif type(module) is nn.Embedding and module.weight is head_weight:
            new = PackedEmbedding(packed(name, module.weight), kernels)
        else:
            continue
        causal.set_submodule(name, new)


def _vector(bias: nn.Parameter | None) -> Tensor | None:
    # A copy, because a view would keep its whole file in memory.
    return None if bias is None else bias.detach().clone()
