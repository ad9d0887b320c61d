"""MixtralForCausalLM: Llama's layers with experts in place of MLPs."""

from __future__ import annotations

from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.experts import MixtureOfExperts, Router, separate_experts
from paceline.models.llama import Llama
from paceline.models.model_config import ModelConfig


class Mixtral(Llama):
    """A Mixtral model: a Llama whose MLPs are experts."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        def make_mlp(layer: int, place: str) -> MixtureOfExperts:
            experts_place = f"model.layers.{layer}.block_sparse_moe"
            router = Router.take(config, weights, f"{experts_place}.gate", kernels)
            experts = separate_experts(config, weights, f"{experts_place}.experts", kernels, ("w1", "w3", "w2"))
            return MixtureOfExperts(router, experts, kernels)

        super().__init__(config, weights, kernels, make_mlp=make_mlp)
