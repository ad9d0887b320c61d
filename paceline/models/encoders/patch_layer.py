"""A layer of the vision towers of the Qwen family, over patches whose heads turn by their rows and columns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.blocks import Linear
from paceline.models.encoders.blocks import LayerNorm
from paceline.models.encoders.pieces import Pieces


class PatchLayer:
    """Attention between all patches and an MLP: x [patches, size] -> [patches, size].

    Args:
        place: prefix of the names of the layer's tensors.
        up, down: the linear layers of the MLP.
        activation: the function between them.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        eps: float,
        weights: Weights,
        place: str,
        kernels: Kernels,
        up: Linear,
        down: Linear,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        self._heads, self._scale = heads, (size // heads) ** -0.5
        self._norm, self._mlp_norm = (LayerNorm(weights, f"{place}.norm{n}", size, eps, kernels) for n in (1, 2))
        self._qkv = Linear.take_parts(weights, f"{place}.attn.qkv", size, (size,) * 3, True, kernels)
        self._o = Linear.take(weights, f"{place}.attn.proj", size, size, True, kernels)
        self._up, self._down, self._activation = up, down, activation
        self._kernels = kernels

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, pieces: Pieces) -> Tensor:
        queries, keys, values = pieces.of(self._heads_of, x, cos, sin)
        (x,) = pieces.of(partial(self._attend, keys=keys, values=values), x, queries, keys=len(keys))
        return x

    def _heads_of(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = self._norm(x)
        q, k, v = (linear(normed).view(len(x), self._heads, -1) for linear in self._qkv)
        return self._kernels.rotate(q, cos, sin), self._kernels.rotate(k, cos, sin), v

    def _attend(self, x: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor]:
        kernels = self._kernels
        x = kernels.add(x, self._o(kernels.full_attention(queries, keys, values, self._scale).flatten(1)))
        return (kernels.add(x, self._down(self._activation(self._up(self._mlp_norm(x))))),)
