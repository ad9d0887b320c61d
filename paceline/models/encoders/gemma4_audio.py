"""The audio tower of Gemma 4's small models: a conformer over log-mel features.

Conformer: Gulati et al. 2020, https://arxiv.org/abs/2005.08100. Relative positions: Dai et al. 2019, appendix B,
https://arxiv.org/abs/1901.02860.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import InvalidRequestError
from paceline.kernels.encoding import Between
from paceline.kernels.interface import Kernels, NormKind
from paceline.models.base import Weights
from paceline.models.blocks import Linear, RMSNorm
from paceline.models.encoder_config import Gemma4AudioConfig
from paceline.models.encoders.blocks import LayerNorm, Projection, channels_last, media_place, tower_linear
from paceline.models.encoders.local_attention import attend_locally, distance_embeddings

_FRAMES_PER_ROW = 4
_EPS = 1e-6
"""`eps` of norms for which the config gives none."""


class Gemma4Audio:
    """The encoder of audio, from log-mel features fp32 [frames, features]."""

    takes = torch.float32

    def __init__(self, config: Gemma4AudioConfig, hidden_size: int, weights: Weights, kernels: Kernels) -> None:
        place = media_place(weights, "output_proj.weight", "audio_tower")
        self._config = config
        self._shorten = _Shortening(config, weights, f"{place}.subsample_conv_projection", kernels)
        self._layers = [_Layer(config, weights, f"{place}.layers.{layer}", kernels) for layer in range(config.layers)]
        self._output = Linear.take(
            weights, f"{place}.output_proj", config.hidden_size, config.output_size, True, kernels
        )
        self._project = Projection(weights, ("embed_audio",), config.output_size, hidden_size, config.norm_eps, kernels)

    def rows(self, shape: Sequence[int]) -> int:
        if len(shape) != 2 or shape[0] < 1 or shape[1] != self._config.features:
            raise InvalidRequestError(
                f"audio for this model must be log-mel features [frames, {self._config.features}], not {list(shape)}"
            )
        return -(-shape[0] // _FRAMES_PER_ROW)

    def encode(self, x: Tensor, between: Between) -> Tensor:
        config = self._config
        hidden = self._shorten(x)
        distances = distance_embeddings(config.window, config.hidden_size).to(hidden)
        for layer in self._layers:
            between()
            hidden = layer(hidden, distances)
        return self._project(self._output(hidden))


class _Shortening:
    """Two convolutions that halve the frames and the features, and a linear layer.

    Takes [frames, features] and returns [rows, hidden].
    """

    def __init__(self, config: Gemma4AudioConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        first, second = config.channels
        self._convolutions = [
            _Halving(config, weights, f"{place}.layer{layer}", *sizes, kernels)
            for layer, sizes in enumerate(((1, first), (first, second)))
        ]
        size = config.features // 4 * second
        self._linear = Linear.take(weights, f"{place}.input_proj_linear", size, config.hidden_size, False, kernels)

    def __call__(self, features: Tensor) -> Tensor:
        x = features.unsqueeze(2)
        for convolution in self._convolutions:
            x = convolution(x)
        return self._linear(x.flatten(1))


class _Halving:
    """A 3 x 3 convolution with stride 2, computed as a linear layer over its patches.

    Takes and returns [frames, features, channels].
    """

    def __init__(
        self, config: Gemma4AudioConfig, weights: Weights, place: str, size_in: int, size_out: int, kernels: Kernels
    ) -> None:
        shape = (size_out, size_in, 3, 3)
        (self._weight,) = weights.take_packed_derived(f"{place}.conv.weight", shape, [channels_last])
        self._linear = Linear(self._weight, None, kernels)
        self._norm = LayerNorm(weights, f"{place}.norm", size_out, config.norm_eps, kernels, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        padded = F.pad(x.to(self._weight.dtype), (0, 0, 1, 1, 1, 1))
        patches = padded.unfold(0, 3, 2).unfold(1, 3, 2).permute(0, 1, 3, 4, 2)
        found = self._norm(self._linear(patches.reshape(-1, self._weight.size_in))).relu_()
        return found.view(*patches.shape[:2], -1)


class _Layer:
    """An MLP, attention, a convolution, and another MLP. Each adds to its input."""

    def __init__(self, config: Gemma4AudioConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        norm = partial(RMSNorm, size=config.hidden_size, eps=_EPS, kernels=kernels, kind=NormKind.WIDE)
        self._first_mlp = _MLP(config, weights, f"{place}.feed_forward1", kernels)
        self._pre_attention = norm(weights, f"{place}.norm_pre_attn")
        self._attention = _Attention(config, weights, f"{place}.self_attn", kernels)
        self._post_attention = norm(weights, f"{place}.norm_post_attn")
        self._convolution = _Convolution(config, weights, f"{place}.lconv1d", kernels)
        self._second_mlp = _MLP(config, weights, f"{place}.feed_forward2", kernels)
        self._norm = norm(weights, f"{place}.norm_out")
        self._bound = _Bound(config, kernels)
        self._kernels = kernels

    def __call__(self, x: Tensor, distances: Tensor) -> Tensor:
        x, bound = self._first_mlp(x), self._bound
        attended = self._attention(self._pre_attention(bound(x)), distances)
        x = self._kernels.add(self._post_attention(bound(attended)), x)
        return self._norm(bound(self._second_mlp(self._convolution(x))))


class _Bound:
    """The bound of elements between the parts of a layer: the config's, or the largest number of the dtype."""

    def __init__(self, config: Gemma4AudioConfig, kernels: Kernels) -> None:
        self._limit = config.limit
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        limit = min(self._limit, torch.finfo(x.dtype).max)
        return self._kernels.clamp(x, -limit, limit)


class _MLP:
    def __init__(self, config: Gemma4AudioConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        size = config.hidden_size
        norm = partial(RMSNorm, size=size, eps=_EPS, kernels=kernels, kind=NormKind.WIDE)
        take = partial(tower_linear, weights, clipped=config.clipped, kernels=kernels)
        self._pre = norm(weights, f"{place}.pre_layer_norm")
        self._up = take(f"{place}.ffw_layer_1", size, 4 * size)
        self._down = take(f"{place}.ffw_layer_2", 4 * size, size)
        self._post = norm(weights, f"{place}.post_layer_norm")
        self._weight = config.residual_weight
        self._bound = _Bound(config, kernels)
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        kernels, bound = self._kernels, self._bound
        found = self._down(kernels.silu(self._up(self._pre(bound(x)))))
        return kernels.add(kernels.scale(self._post(bound(found)), self._weight), x)


class _Attention:
    """Attention of each row to the last `window` rows, with embeddings of their distances. Scores are in fp32."""

    def __init__(self, config: Gemma4AudioConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        size, self._heads = config.hidden_size, config.heads
        self._cap = config.score_cap
        take = partial(tower_linear, weights, size_in=size, size_out=size, clipped=config.clipped, kernels=kernels)
        self._q, self._k, self._v = (take(place=f"{place}.{name}_proj") for name in ("q", "k", "v"))
        self._distances = Linear.take(weights, f"{place}.relative_k_proj", size, size, False, kernels)
        self._post = take(place=f"{place}.post")
        dim = size // config.heads
        scales = F.softplus(weights.take(f"{place}.per_dim_scale", dim, dtype=torch.float32))
        self._query_scales = scales * dim**-0.5 / math.log(2)
        self._key_scale = math.log(1 + math.e) / math.log(2)

    def __call__(self, x: Tensor, distances: Tensor) -> Tensor:
        def heads(linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            return linear(x).float().view(len(x), self._heads, -1)

        queries = heads(self._q, x) * self._query_scales
        keys = heads(self._k, x) * self._key_scale
        attended = attend_locally(queries, keys, heads(self._v, x), heads(self._distances, distances), self._cap)
        return self._post(attended.flatten(1).to(x.dtype))


class _Convolution:
    """A convolution of each channel over a row and those before it, between two linear layers."""

    def __init__(self, config: Gemma4AudioConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        size = config.hidden_size
        norm = partial(RMSNorm, size=size, eps=config.norm_eps, kernels=kernels, kind=NormKind.WIDE)
        take = partial(tower_linear, weights, clipped=config.clipped, kernels=kernels)
        self._pre = norm(weights, f"{place}.pre_layer_norm")
        self._start = take(f"{place}.linear_start", size, 2 * size)
        self._weight = weights.take(f"{place}.depthwise_conv1d.weight", size, 1, config.conv_taps)
        self._norm = norm(weights, f"{place}.conv_norm")
        self._end = take(f"{place}.linear_end", size, size)
        self._bound = _Bound(config, kernels)
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        kernels = self._kernels
        values, gates = self._start(self._pre(x)).chunk(2, dim=1)
        gated = kernels.sigmoid_and_mul(gates, values)
        channels, _, taps = self._weight.shape
        mixed = F.conv1d(F.pad(gated.T, (taps - 1, 0))[None], self._weight, groups=channels)[0].T
        found = self._end(kernels.silu(self._norm(self._bound(mixed))))
        return kernels.add(found, x)
