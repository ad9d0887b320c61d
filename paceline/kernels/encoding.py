"""The part of `Kernels` with operations that only encoders of images and audio have, and these operations in plain
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.packed_weight import PackedWeight

Between: TypeAlias = Callable[[], None]
"""A function that an encoder calls between pieces of its work, so that a worker can give its cores to others."""


Tower: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""The layers of an encoder: a function that takes tensors [rows, ...] on one device and, by name, `between`.

The function returns tensors [rows, ...]. All rows attend to each other.
"""


class EncoderKernels(Protocol):
    """Operations on the rows of one image or audio clip. They read and write no KV cache."""

    def compile_tower(self, tower: Tower) -> Tower:
        """Return a tower with the same results, which may record its operations to launch them faster.

        All tensors that `tower` reads besides its inputs must keep their addresses.
        """

    def clipped_linear(self, x: Tensor, weight: PackedWeight, bounds: Tensor) -> Tensor:
        """Return clip(clip(x [rows, in]) @ weight [out, in].T): [rows, out].

        Args:
            weight: a matrix that is not quantized.
            bounds: fp32 [4]: least and largest element of the clipped x, then of the clipped result.
        """

    def clamp(self, x: Tensor, low: float, high: float) -> Tensor:
        """Return x with each element bounded to [low, high], in the same shape."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""

    def add_layer_norm(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the layer norm of x + y, with the bits of `add` and then `layer_norm`."""

    def gelu(self, x: Tensor) -> Tensor:
        """Return gelu(x), elementwise, in its exact form."""

    def gelu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return gelu(gate) * up, elementwise, with gelu in its exact form. Both are [tokens, size]."""

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """Return gelu(x), elementwise, in its tanh form."""

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(x), elementwise."""

    def full_attention(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return attention of all queries to all keys: [queries, heads, head_dim].

        Args:
            keys, values: [keys, heads, head_dim].
        """


class _LinearKernels(Protocol):
    """The operation of `Kernels` that encoders share with other models."""

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor: ...


class TorchEncoding:
    """`EncoderKernels` in plain torch, for any device."""

    def compile_tower(self, tower: Tower) -> Tower:
        return tower

    def clipped_linear(self: _LinearKernels, x: Tensor, weight: PackedWeight, bounds: Tensor) -> Tensor:
        least, greatest, least_out, greatest_out = bounds.unbind()
        return self.linear(x.clamp(least, greatest), weight).clamp(least_out, greatest_out)

    def clamp(self, x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def add_layer_norm(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self.layer_norm(x + y, weight, bias, eps)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def gelu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate) * up

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def full_attention(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        # torch's fused kernels need the leading dimension of 1.
        queries, keys, values = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        attended: Tensor = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
        return attended[0].transpose(0, 1)
