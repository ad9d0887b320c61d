"""Qwen3MoeForCausalLM: the models of Qwen 3 with experts."""

from __future__ import annotations

from paceline.kernels.experts import ExpertWeights
from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.blocks import GatedMLP
from paceline.models.experts import MixtureOfExperts, Router, experts_of, fused_experts, separate_experts
from paceline.models.layers import MLP
from paceline.models.llama import Llama
from paceline.models.model_config import ModelConfig


class Qwen3Moe(Llama):
    """A Qwen 3 model with norms of queries and keys, and experts instead of MLPs in most or all layers.

    Args:
        fused: the experts of a layer share two tensors.
    """

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, fused: bool = False) -> None:
        def take_experts(place: str) -> ExpertWeights:
            if not fused:
                return separate_experts(config, weights, place, kernels)
            sizes, hidden = experts_of(config), config.hidden_size
            gate_up, down = f"{place}.gate_up_proj", f"{place}.down_proj"
            # Released checkpoints have matrices [in, out], and those that transformers 5 saves have [out, in].
            transposed = weights.has(gate_up, sizes.count, hidden, 2 * sizes.inner_size) and weights.has(
                down, sizes.count, sizes.inner_size, hidden
            )
            return fused_experts(config, weights, gate_up, down, kernels, transposed)

        def make_mlp(layer: int, place: str) -> MLP:
            if not config.has_experts(layer):
                return GatedMLP(config, weights, place, kernels)
            router = Router.take(config, weights, f"{place}.gate", kernels)
            return MixtureOfExperts(router, take_experts(f"{place}.experts"), kernels)

        super().__init__(config, weights, kernels, head_norms=True, make_mlp=make_mlp)
