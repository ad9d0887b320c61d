"""Layers with a state, computed by the native library (src/recurrent.h and src/delta.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import RecurrentState
from paceline.kernels.native.library import Cache, KernelKind, Op
from paceline.kernels.native.operations import Operations, need

_MOST_TAPS = 16
"""Largest number of taps of a convolution; `kMostTaps` of src/recurrent.h."""


class NativeRecurrence(Operations):
    """`RecurrentKernels`, computed by the native library."""

    compiles_states = True

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        (tokens, channels), taps = x.shape, len(weight)
        if taps > _MOST_TAPS:
            raise ConfigError(f"the native kernels convolve up to {_MOST_TAPS} inputs; choose --kernels reference")
        need("the weight", weight, x.dtype, taps, channels)
        if bias is not None:
            need("the bias", bias, x.dtype, channels)
        x, out, rows = x.contiguous(), x.new_empty(x.shape), max(taps - 1, state.shape[1])
        op = Op(KernelKind.CAUSAL_CONV, rows=tokens, n0=channels, n1=taps, n2=rows, cache=_state(state, rows, channels))
        self.run(op, out, (x, weight, bias), batch, group)
        return out

    def selective_scan(
        self,
        x: Tensor,
        time_steps: Tensor,
        rates: Tensor,
        state: RecurrentState,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        tokens, (_, heads, head_dim, state_size) = len(x), state.state.shape
        need("the inputs", x, x.dtype, tokens, heads * head_dim + 2 * state_size)
        need("the time steps", time_steps, x.dtype, tokens, heads)
        need("the rates", rates, torch.float32, 3, heads)
        out = x.new_empty(tokens, heads * head_dim)
        cache = _recurrent_state(state, x.shape[1] + heads)
        op = Op(KernelKind.SELECTIVE_SCAN, rows=tokens, n0=state_size, n1=_room(state), cache=cache)
        self.run(op, out, (x.contiguous(), time_steps.contiguous(), rates), batch, group)
        return out

    def gated_delta_rule(
        self,
        x: Tensor,
        gates: Tensor,
        time_steps: Tensor,
        rates: Tensor,
        state: RecurrentState,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        tokens, (_, heads, key_dim, value_dim) = len(x), state.state.shape
        key_heads = (x.shape[1] - heads * value_dim) // (2 * key_dim)
        need("the inputs", x, x.dtype, tokens, 2 * key_heads * key_dim + heads * value_dim)
        need("the gates", gates, x.dtype, tokens, heads)
        need("the time steps", time_steps, x.dtype, tokens, heads)
        need("the rates", rates, torch.float32, 2, heads)
        if key_heads < 1 or heads % key_heads:
            raise ValueError(f"{heads} value heads cannot share {key_heads} key heads evenly")
        out = x.new_empty(tokens, heads * value_dim)
        cache = _recurrent_state(state, x.shape[1] + 2 * heads)
        op = Op(KernelKind.GATED_DELTA_RULE, rows=tokens, n0=value_dim, n1=key_heads, n2=_room(state), cache=cache)
        self.run(op, out, (x.contiguous(), gates.contiguous(), time_steps.contiguous(), rates), batch, group)
        return out


def _state(state: Tensor, *shape: int) -> Cache:
    """Return the C structure of a part of a layer's state."""
    slots = len(state)
    need("the state", state, torch.float32, slots, *shape)
    if not state[0].is_contiguous():
        raise ValueError(f"the state: a slot's part must be dense; its strides are {state.stride()}")
    return Cache(state.data_ptr(), None, slots, slot_stride=state.stride(0))


def _recurrent_state(state: RecurrentState, inputs: int) -> Cache:
    """Return the C structure of a recurrence's state [slots, heads, ...]. A token has `inputs` pending inputs."""
    _, heads, head_dim, *_ = state.state.shape
    cache = _state(state.state, *state.state.shape[1:])
    pending = _state(state.pending, 1 + _room(state), inputs)
    if (pending.slots, pending.slot_stride) != (cache.slots, cache.slot_stride):
        raise ValueError("the pending inputs must be in the same blocks as the state")
    cache.values, cache.kv_heads, cache.head_dim = pending.keys, heads, head_dim
    return cache


def _room(state: RecurrentState) -> int:
    """Return the number of tokens for whose pending inputs a block has room."""
    return max(0, state.pending.shape[1] - 1)
