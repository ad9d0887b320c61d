"""The mixer of Mamba-2 layers."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.caches import AnyCache, LayerState, RecurrentState
from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.blocks import AttentionStep, Linear, RMSNorm
from paceline.models.model_config import ModelConfig


class MambaMixer:
    """A Mamba-2 mixer, in place of attention: a convolution over the last few tokens, then a recurrence over all."""

    def __init__(self, config: ModelConfig, weights: Weights, place: str, kernels: Kernels) -> None:
        mamba, hidden = config.mamba, config.hidden_size
        assert mamba is not None
        inner, channels, heads, taps = mamba.inner_size, mamba.conv_channels, mamba.heads, mamba.conv_taps
        self._gate, self._in, self._time_steps = Linear.take_parts(
            weights, f"{place}.in_proj", hidden, (inner, channels, heads), mamba.bias, kernels
        )
        self._conv = weights.take(f"{place}.conv1d.weight", channels, 1, taps)[:, 0].T.contiguous()
        self._conv_bias = weights.take(f"{place}.conv1d.bias", channels) if mamba.conv_bias else None
        decay, bias, skip = (weights.take(f"{place}.{name}", heads).float() for name in ("A_log", "dt_bias", "D"))
        if not (
            decay.is_meta or bias.is_meta or skip.is_meta
        ):  # a tensor on the meta device is missing, which the loader reports
            self._rates = torch.stack((-decay.exp(), bias, skip))
        self._norm = RMSNorm(weights, f"{place}.norm", inner, config.norm_eps, kernels)
        self._out = Linear.take(weights, f"{place}.out_proj", inner, hidden, mamba.bias, kernels)
        self._kernels = kernels

    def __call__(self, x: Tensor, cache: AnyCache, step: AttentionStep) -> Tensor:
        kernels = self._kernels
        assert isinstance(cache, LayerState)
        *scanned, convolved = cache.parts
        seen = kernels.causal_conv(self._in(x), self._conv, self._conv_bias, convolved, step.batch, step.group)
        state = RecurrentState(*scanned)
        found = kernels.selective_scan(seen, self._time_steps(x), self._rates, state, step.batch, step.group)
        return self._out(self._norm(kernels.silu_and_mul(self._gate(x), found)))
