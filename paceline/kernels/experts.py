"""The part of `Kernels` with the operations of layers with experts (mixture of experts)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.experts import ExpertActivation, Routing
from paceline.kernels.packed_weight import PackedWeight

LEAST_SUM = 1e-20
"""Number added to the sum by which weights are divided, so that weights are not NaN if all scores are 0."""
_SWIGLU_FACTOR, _SWIGLU_LIMIT = 1.702, 7.0


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of a layer's experts. Expert e computes down[e](act(gate[e](x), up[e](x)))."""

    gate: Sequence[PackedWeight]
    """One matrix [inner, hidden] for each expert."""
    up: Sequence[PackedWeight]
    """One matrix [inner, hidden] for each expert."""
    down: Sequence[PackedWeight]
    """One matrix [hidden, inner] for each expert."""
    activation: ExpertActivation
    gate_bias: Tensor | None = None
    """Bias of each expert, [experts, inner]. Either all three biases are given, or all are None."""
    up_bias: Tensor | None = None
    """[experts, inner], like `gate_bias`."""
    down_bias: Tensor | None = None
    """[experts, hidden], like `gate_bias`."""
    table: Tensor | None = None
    """The backend's index of these weights, which `ExpertKernels.index_experts` makes; None before that."""

    def __post_init__(self) -> None:
        """Raise ValueError if shapes differ, because kernels read the matrices by their addresses alone."""
        inner, hidden, count = self.gate[0].size_out, self.gate[0].size_in, len(self.gate)
        shapes = {(matrix.size_out, matrix.size_in) for matrix in (*self.gate, *self.up)}
        back = {(matrix.size_out, matrix.size_in) for matrix in self.down}
        if (shapes, back) != ({(inner, hidden)}, {(hidden, inner)}) or {len(self.up), len(self.down)} != {count}:
            raise ValueError(f"all {count} experts must have matrices {inner} x {hidden} and {hidden} x {inner}")
        biases = self.gate_bias, self.up_bias, self.down_bias
        wanted = [(count, inner), (count, inner), (count, hidden)]
        if any(bias is not None for bias in biases) and [bias is not None and bias.shape for bias in biases] != wanted:
            raise ValueError(f"the biases of experts must have the shapes {wanted}")


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return the activation "clamped_swiglu" (`ExpertActivation`), computed in fp32 and rounded once."""
    low = gate.float().clamp(max=_SWIGLU_LIMIT)
    bounded = up.float().clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT)
    return (low * torch.sigmoid(_SWIGLU_FACTOR * low) * (bounded + 1)).to(gate.dtype)


class ExpertKernels(Protocol):
    """Operations of layers with experts. A token's results do not depend on the batch or on experts of other tokens."""

    def router_logits(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """Return x [tokens, hidden] @ weight.T + bias in fp32, without rounding to x's dtype: [tokens, experts]."""

    def choose_experts(
        self, logits: Tensor, routing: Routing, correction: Tensor | None = None, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token, best first. If two are equal, the first one is better.

        Args:
            logits: fp32 [tokens, experts].
            correction: fp32 [experts], added to the scores for the choice of experts, but not to the weights.
            scales: fp32 [experts], a factor on the weight of each expert.

        Returns:
            The experts, int64 [tokens, top_k], and their weights, fp32 [tokens, top_k].
        """

    def index_experts(self, experts: ExpertWeights) -> ExpertWeights:
        """Return the same weights with the index that `experts` needs. Models call this once, when they are loaded."""

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        """Return the weighted sum of the results of each token's experts: x [tokens, hidden] -> same shape.

        Products and activations are rounded to x's dtype. The sum is computed in fp32, in the order of `ids`, and
        rounded once. Weights of experts that no token has are not read.

        Args:
            ids: int64 [tokens, top_k], different numbers of experts in each row.
            weights: fp32 [tokens, top_k].
            experts: the result of `index_experts`.
        """

    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        """Return x + sigmoid(gate) * y for x, y [tokens, hidden] and gate [tokens, 1]."""
