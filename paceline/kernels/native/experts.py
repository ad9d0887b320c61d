"""Layers with experts, computed by the native library (src/experts.h)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.experts import ExpertActivation, Routing
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.native.library import Cache, KernelKind, Op
from paceline.kernels.native.operations import Operations, need, with_dense_rows
from paceline.kernels.native.tiles import FIXED_SCALE
from paceline.kernels.packed_weight import PackedWeight

_ACTIVATIONS: tuple[ExpertActivation, ...] = ("silu", "gelu_tanh", "clamped_swiglu")
"""Activations in the order of `ExpertActivation` of src/program.h: the index is the library's number."""
_MOST_GROUPS = 64
"""Largest number of groups of experts; `kMostGroups` of src/program.h."""
_SIGMOID, _NORMALIZE, _SCORE_OF_TWO = 1, 2, 4


class NativeExperts(Operations):
    """`ExpertKernels`, computed by the native library."""

    def router_logits(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            need("the bias", bias, x.dtype, weight.size_out)
        return self.multiply(KernelKind.ROUTER_LOGITS, x, weight, bias, torch.float32)

    def choose_experts(
        self, logits: Tensor, routing: Routing, correction: Tensor | None = None, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        tokens, experts = logits.shape
        need("the logits", logits, torch.float32, tokens, experts)
        if routing.groups > _MOST_GROUPS:
            raise ConfigError(f"the native kernels take {_MOST_GROUPS} groups of experts; choose --kernels reference")
        if experts % routing.groups or not 1 <= routing.top_k <= experts // routing.groups * routing.top_groups:
            raise ValueError(f"{routing} cannot choose among {experts} experts")
        for name, change in (("the corrections", correction), ("the scales", scales)):
            if change is not None:
                need(name, change, change.dtype, experts)
        changes = None if correction is None and scales is None else _changes_of(correction, scales)
        weights = logits.new_empty(tokens, routing.top_k)
        ids = logits.new_empty(tokens, routing.top_k, dtype=torch.int64)
        op = Op(
            KernelKind.CHOOSE_EXPERTS, rows=tokens, n0=experts, n1=routing.top_k, n2=routing.groups, f0=routing.factor
        )
        op.cache.slots, op.format = routing.top_groups, _choosing_format(routing)
        self.run(op, weights, (logits.contiguous(), changes, ids))
        return ids, weights

    def index_experts(self, experts: ExpertWeights) -> ExpertWeights:
        """Return the weights with a table of the addresses and formats of matrices and biases: int64 [experts, 9].

        A row of the table is an `Expert` of src/experts.h. If a tensor is missing, which the loader reports, there is
        no table.
        """
        if any(
            (weight.format or 0) & FIXED_SCALE for part in (experts.gate, experts.up, experts.down) for weight in part
        ):
            raise ConfigError(
                "the native kernels round the input of experts with a scale for each token, but the checkpoint has "
                "fixed scales; choose --quantization none"
            )
        given = experts.gate_bias, experts.up_bias, experts.down_bias
        gate_bias, up_bias, down_bias = biases = [None if bias is None else bias.contiguous() for bias in given]
        matrices = list(zip(experts.gate, experts.up, experts.down))
        tensors = [weight.data for matrix in matrices for weight in matrix] + [
            bias for bias in biases if bias is not None
        ]
        if any(tensor.is_meta for tensor in tensors):
            return experts
        rows = [
            [
                *(weight.data.data_ptr() for weight in expert_weights),
                *(weight.format or 0 for weight in expert_weights),
                *(0 if bias is None else bias[expert].data_ptr() for bias in biases),
            ]
            for expert, expert_weights in enumerate(matrices)
        ]
        return replace(experts, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias, table=torch.tensor(rows))

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        (tokens, hidden), top_k, gate = x.shape, ids.shape[1], experts.gate[0]
        if experts.table is None or (gate.size_in, gate.dtype) != (hidden, x.dtype):
            raise ValueError(f"x is {list(x.shape)} {x.dtype}; the experts take [tokens, {gate.size_in}] {gate.dtype}")
        need("the experts of tokens", ids, torch.int64, tokens, top_k)
        need("their weights", weights, torch.float32, tokens, top_k)
        x = with_dense_rows(x)
        out = x.new_empty(tokens, hidden)
        op = Op(KernelKind.EXPERTS, rows=tokens, n0=hidden, n1=gate.size_out, n2=x.stride(0))
        op.format = _ACTIVATIONS.index(experts.activation)
        op.cache = Cache(experts.table.data_ptr(), None, len(experts.gate), top_k)
        self.run(op, out, (x, ids.contiguous(), weights.contiguous()))
        return out

    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        tokens, size = x.shape
        need("the second operand", y, x.dtype, tokens, size)
        need("the gate", gate, x.dtype, tokens, 1)
        out = x.new_empty(tokens, size)
        operands = (x.contiguous(), y.contiguous(), gate.contiguous())
        self.run(Op(KernelKind.ADD_GATED, rows=tokens, n0=size), out, operands)
        return out


def _choosing_format(routing: Routing) -> int:
    """Return `Choosing` of src/program.h."""
    return (
        _SIGMOID * (routing.scores == "sigmoid")
        + _NORMALIZE * routing.normalize
        + _SCORE_OF_TWO * (routing.group_score == "top2")
    )


def _changes_of(correction: Tensor | None, scales: Tensor | None) -> Tensor:
    """Return corrections and scales of experts as one tensor, fp32 [2, experts]. At least one of them is given."""
    if correction is None:
        assert scales is not None
        correction = torch.zeros_like(scales)
    return torch.stack((correction, torch.ones_like(correction) if scales is None else scales)).float()
