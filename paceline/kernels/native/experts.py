"""The numbers by which the native kernels know the options of layers with experts. See src/experts.h."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.experts import ExpertActivation, Routing
from paceline.kernels.experts import ExpertWeights

ACTIVATIONS: tuple[ExpertActivation, ...] = ("silu", "gelu_tanh", "clamped_swiglu")
"""In the order of `ExpertActivation` of src/program.h."""
MOST_GROUPS = 64
"""`kMostGroups` of src/program.h."""
_SIGMOID, _NORMALIZE, _SCORE_OF_TWO = 1, 2, 4


def choosing_format(routing: Routing) -> int:
    """Return `Choosing` of src/program.h."""
    return (
        _SIGMOID * (routing.scores == "sigmoid")
        + _NORMALIZE * routing.normalize
        + _SCORE_OF_TWO * (routing.group_score == "top2")
    )


def changes_of(correction: Tensor | None, scales: Tensor | None) -> Tensor:
    """Return corrections and scales of experts as one tensor, fp32 [2, experts]. At least one of them is given."""
    if correction is None:
        assert scales is not None
        correction = torch.zeros_like(scales)
    return torch.stack((correction, torch.ones_like(correction) if scales is None else scales)).float()


def index_experts(experts: ExpertWeights) -> ExpertWeights:
    """Return the weights with a table of the addresses and formats of their matrices and biases: int64 [experts, 9].

    A row is `Expert` of src/experts.h. There is no table if a tensor is missing, which the loader reports.
    """
    gate_bias, up_bias, down_bias = biases = [
        None if bias is None else bias.contiguous() for bias in (experts.gate_bias, experts.up_bias, experts.down_bias)
    ]
    matrices = list(zip(experts.gate, experts.up, experts.down))
    tensors = [weight.data for own in matrices for weight in own] + [bias for bias in biases if bias is not None]
    if any(tensor.is_meta for tensor in tensors):
        return experts
    rows = [
        [
            *(weight.data.data_ptr() for weight in own),
            *(weight.format or 0 for weight in own),
            *(0 if bias is None else bias[expert].data_ptr() for bias in biases),
        ]
        for expert, own in enumerate(matrices)
    ]
    return replace(experts, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias, table=torch.tensor(rows))
