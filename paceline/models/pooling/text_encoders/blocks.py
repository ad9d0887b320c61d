"""Building blocks of encoders of text."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.caches import LayerCache
from paceline.kernels.interface import ForwardInputs, Kernels
from paceline.models.base import Weights
from paceline.models.blocks import Linear
from paceline.models.rotary import Rotation
from paceline.models.text_encoder_config import TextActivation, TextEncoderConfig


class TextNorm:
    """Layer norm over the last dimension, or over that of a sum."""

    def __init__(
        self, weights: Weights, place: str, config: TextEncoderConfig, kernels: Kernels, size: int | None = None
    ) -> None:
        size = size or config.hidden_size
        self._weight = weights.take(f"{place}.weight", size)
        self._bias = weights.take(f"{place}.bias", size) if config.norm_bias else None
        self._eps = config.norm_eps
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.layer_norm(x, self._weight, self._bias, self._eps)

    def of_sum(self, x: Tensor, y: Tensor) -> Tensor:
        return self._kernels.add_layer_norm(x, y, self._weight, self._bias, self._eps)


class BidirectionalAttention:
    """Attention of each token to all tokens of its text, or to those near it.

    Args:
        q, k, v: the projections of [tokens, hidden].
        output: the projection after attention.
        group: index of the layer's group in the batch; the second group has a window.
    """

    def __init__(
        self, q: Linear, k: Linear, v: Linear, output: Linear, heads: int, head_dim: int, group: int, kernels: Kernels
    ) -> None:
        self._q, self._k, self._v, self._output = q, k, v, output
        self._heads, self._head_dim, self._group = heads, head_dim, group
        self._kernels = kernels

    def __call__(self, x: Tensor, inputs: ForwardInputs, rotation: Rotation | None) -> Tensor:
        kernels, group, (cache,) = self._kernels, inputs.batch.groups[self._group], inputs.caches
        assert isinstance(cache, LayerCache)
        queries, keys, values = (each(x).view(-1, self._heads, self._head_dim) for each in (self._q, self._k, self._v))
        if rotation is None:
            kernels.store_kv(keys, values, cache, group)
        else:
            queries = kernels.rotate_and_store(queries, keys, values, rotation.cos, rotation.sin, cache, group)
        attended = kernels.attention(
            queries, cache, inputs.batch, group, self._head_dim**-0.5, looks_ahead=True, both_sides=self._group > 0
        )
        return self._output(attended.flatten(1))


class TextMLP:
    """An MLP: x -> down(activation(up(x))), or x -> down(activation(gate(x)) * up(x)) if it has a gate."""

    def __init__(
        self, up: Linear, gate: Linear | None, down: Linear, activation: TextActivation, kernels: Kernels
    ) -> None:
        self._up, self._gate, self._down = up, gate, down
        plain = {"gelu": kernels.gelu, "gelu_tanh": kernels.gelu_tanh, "silu": kernels.silu}
        gated = {
            "gelu": kernels.gelu_and_mul,
            "gelu_tanh": kernels.gelu_tanh_and_mul,
            "silu": kernels.silu_and_mul,
        }
        self._activate, self._activate_and_mul = plain[activation], gated[activation]

    def __call__(self, x: Tensor) -> Tensor:
        up = self._up(x)
        return self._down(self._activate(up) if self._gate is None else self._activate_and_mul(self._gate(x), up))
