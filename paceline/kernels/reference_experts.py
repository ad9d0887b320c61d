"""`ExpertKernels` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.experts import Routing
from paceline.kernels.experts import LEAST_SUM, ExpertWeights, clamped_swiglu
from paceline.kernels.interface import Kernels
from paceline.kernels.packed_weight import PackedWeight


class ReferenceExperts:
    """Base class with the operations of layers with experts. They call `linear` and activations of the subclass."""

    def router_logits(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        return F.linear(x.float(), weight.data.float(), None if bias is None else bias.float())

    def choose_experts(
        self, logits: Tensor, routing: Routing, correction: Tensor | None = None, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scores = torch.softmax(logits, dim=-1) if routing.scores == "softmax" else torch.sigmoid(logits)
        wanted = scores if correction is None else scores + correction
        if routing.groups > 1:
            wanted = _only_best_groups(wanted, routing)
        # A stable sort, because `topk` has no order of equal numbers.
        ids = torch.sort(wanted, dim=-1, descending=True, stable=True).indices[:, : routing.top_k].contiguous()
        weights = scores.gather(1, ids)
        if routing.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        weights = weights * routing.factor
        return ids, weights if scales is None else weights * scales[ids]

    def index_experts(self, experts: ExpertWeights) -> ExpertWeights:
        return experts

    def experts(self: Kernels, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        parts = x.new_empty(*ids.shape, x.shape[1])
        for expert in sorted(set(ids.flatten().tolist())):
            rows, places = (ids == expert).nonzero(as_tuple=True)
            parts[rows, places] = _expert(self, x[rows], expert, experts)
        total = torch.zeros_like(x, dtype=torch.float32)
        for place in range(ids.shape[1]):
            total = total + weights[:, place, None] * parts[:, place].float()
        return total.to(x.dtype)

    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        return x + torch.sigmoid(gate) * y


def _only_best_groups(wanted: Tensor, routing: Routing) -> Tensor:
    """Replace the scores [tokens, experts] of all experts outside of the best groups by -inf."""
    grouped = wanted.view(len(wanted), routing.groups, -1)
    best = grouped.topk(1 if routing.group_score == "max" else 2, dim=-1).values.sum(-1)
    chosen = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
    return grouped.masked_fill(~is_chosen.unsqueeze(-1), float("-inf")).flatten(1)


def _expert(kernels: Kernels, x: Tensor, expert: int, experts: ExpertWeights) -> Tensor:
    """Return the results of one expert for x [tokens, hidden]."""

    def of(biases: Tensor | None) -> Tensor | None:
        return None if biases is None else biases[expert]

    gate = kernels.linear(x, experts.gate[expert], of(experts.gate_bias))
    up = kernels.linear(x, experts.up[expert], of(experts.up_bias))
    activate = {
        "silu": kernels.silu_and_mul,
        "gelu_tanh": kernels.gelu_tanh_and_mul,
        "clamped_swiglu": clamped_swiglu,
    }
    return kernels.linear(activate[experts.activation](gate, up), experts.down[expert], of(experts.down_bias))
