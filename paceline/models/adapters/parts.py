"""One adapter's part for one linear layer, from the tensors of a module."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.adapters import LowRank
from paceline.models.adapters.base_weights import BaseWeights
from paceline.models.adapters.linears import NamedLinear
from paceline.models.adapters.peft_tensors import ModuleTensors


def make_part(own: ModuleTensors, scale: float, named: NamedLinear, dtype: torch.dtype, base: BaseWeights) -> LowRank:
    """Return the part of an adapter for a layer.

    Args:
        own: the tensors of the layer's module, which fit it.
        scale: the factor of the adapter's product.
        dtype: dtype of the part's tensors.
    """
    outputs = _outputs(named)
    if own.down is None or own.up is None:
        down, up = torch.zeros(1, named.size_in), torch.zeros(len(named.outputs), 1)
    else:
        down, up = own.down, own.up[outputs]
    if own.magnitude is None and own.own_bias is None:
        bias = None if own.bias is None else _copy(own.bias[outputs], dtype)
        return LowRank(_copy(down, dtype), _copy(up.T, dtype), scale, bias)
    factors = torch.ones(len(up), dtype=torch.float64)
    if own.magnitude is not None:
        factors = own.magnitude[outputs].double() / _lengths(down, up, scale, named, base)
    # The layer has added its own bias already, which the factors must not change.
    bias = torch.zeros_like(factors) if own.bias is None else factors * scale * own.bias[outputs]
    if named.linear.bias is not None:
        before = named.linear.bias.double().cpu()
        bias += (before if own.own_bias is None else own.own_bias[outputs]) - factors * before
    up = up.double() * (factors * scale)[:, None]
    kept = None if own.magnitude is None else factors.float()
    return LowRank(_copy(down, dtype), _copy(up.T, dtype), 1.0, _copy(bias, dtype), kept)


def _outputs(named: NamedLinear) -> slice | Tensor:
    of = named.outputs
    return slice(of.start, of.stop) if isinstance(of, range) else torch.tensor(of)


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy, because a view would keep the whole file in memory."""
    return tensor.to(dtype).clone(memory_format=torch.contiguous_format)


def _lengths(down: Tensor, up: Tensor, scale: float, named: NamedLinear, base: BaseWeights) -> Tensor:
    """Return the lengths of the rows of matrix + scale * up @ down: fp64 [out]. The sum itself is never made."""
    wide, rows = down.double(), up.double()
    across = (base.products(named, down.float()).T * rows).sum(1)
    added = ((rows @ (wide @ wide.T)) * rows).sum(1)
    return (base.squares(named) + 2 * scale * across + scale * scale * added).clamp(min=0).sqrt()
