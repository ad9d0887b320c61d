"""The building block of layers with the gated delta rule (linear attention)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.caches import AnyCache, LayerState, RecurrentState
from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.blocks import AttentionStep, Linear, RMSNorm
from paceline.models.model_config import ModelConfig
from paceline.models.order import order_by_part


class GatedDeltaNet:
    """A gated delta net, in place of attention: a convolution over the last few tokens, then a recurrence over all.

    In bf16, transformers rounds the gates of updates before they are used, and does not round silu(gate) of the result.
    """

    def __init__(self, config: ModelConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        delta, hidden = config.delta, config.hidden_size
        assert delta is not None
        heads, values, channels, taps = delta.heads, delta.heads * delta.value_dim, delta.conv_channels, delta.conv_taps
        if delta.grouped:
            shared = heads // delta.key_heads
            sizes = (delta.key_dim, delta.key_dim, shared * delta.value_dim, shared * delta.value_dim)
            self._in, self._gate = Linear.take_parts(
                *(weights, f"{place}.in_proj_qkvz", hidden, (channels, values), False, kernels),
                order=order_by_part(delta.key_heads, sizes),
            )
            self._update_gates, self._time_steps = Linear.take_parts(
                *(weights, f"{place}.in_proj_ba", hidden, (heads, heads), False, kernels),
                order=order_by_part(delta.key_heads, (shared, shared)),
            )
        else:
            self._in, self._gate, self._update_gates, self._time_steps = (
                Linear.take(weights, f"{place}.in_proj_{name}", hidden, size, False, kernels)
                for name, size in (("qkv", channels), ("z", values), ("b", heads), ("a", heads))
            )
        self._conv = weights.take(f"{place}.conv1d.weight", channels, 1, taps)[:, 0].T.contiguous()
        decay, bias = (weights.take(f"{place}.{name}", heads, dtype=torch.float32) for name in ("A_log", "dt_bias"))
        if not (decay.is_meta or bias.is_meta):  # a tensor on the meta device is missing, which the loader reports
            self._rates = torch.stack((-decay.exp(), bias))
        self._norm = RMSNorm(weights, f"{place}.norm", delta.value_dim, config.norm_eps, kernels)
        self._out = Linear.take(weights, f"{place}.out_proj", values, hidden, False, kernels)
        self._head_shape = (heads, delta.value_dim)
        self._kernels = kernels

    def __call__(self, x: Tensor, cache: AnyCache, step: AttentionStep) -> Tensor:
        kernels = self._kernels
        assert isinstance(cache, LayerState)
        *advanced, convolved = cache.parts
        mixed, gate, update_gates, time_steps = self._in(x), self._gate(x), self._update_gates(x), self._time_steps(x)
        seen = kernels.causal_conv(mixed, self._conv, None, convolved, step.batch, step.group)
        found = kernels.gated_delta_rule(
            seen, update_gates, time_steps, self._rates, RecurrentState(*advanced), step.batch, step.group
        ).view(-1, *self._head_shape)
        return self._out(kernels.silu_and_mul(gate, self._norm(found).flatten(1)))
