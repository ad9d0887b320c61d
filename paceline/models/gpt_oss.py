"""GptOssForCausalLM: layers with experts, attention sinks, and windows."""

from __future__ import annotations

from paceline.kernels.interface import Kernels, NormKind
from paceline.models.base import Weights
from paceline.models.experts import MixtureOfExperts, Router, fused_experts
from paceline.models.llama import Llama
from paceline.models.model_config import ModelConfig


class GptOss(Llama):
    """A GPT-OSS model: experts as MLPs. Attention has sinks, and a window in every other layer."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        def make_mlp(layer: int, place: str) -> MixtureOfExperts:
            router = Router.take(config, weights, f"{place}.router", kernels)
            gate_up, down = f"{place}.experts.gate_up_proj", f"{place}.experts.down_proj"
            experts = fused_experts(config, weights, gate_up, down, kernels, transposed=True, interleaved=True)
            return MixtureOfExperts(router, experts, kernels)

        super().__init__(config, weights, kernels, make_mlp=make_mlp, norm_kind=NormKind.WIDE)
