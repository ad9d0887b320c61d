"""The class that computes each architecture. A new architecture needs one line here and one in `_READERS` of
config/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from paceline.kernels.interface import Kernels, NormKind
from paceline.models.base import Architecture, Weights
from paceline.models.deepseek import Deepseek
from paceline.models.gemma3 import Gemma3
from paceline.models.gemma4 import Gemma4
from paceline.models.gpt_oss import GptOss
from paceline.models.granite_hybrid import GraniteHybrid
from paceline.models.llama import Llama
from paceline.models.mixtral import Mixtral
from paceline.models.model_config import ModelConfig
from paceline.models.qwen3_5 import Qwen35WithMedia
from paceline.models.qwen3_moe import Qwen3Moe
from paceline.models.qwen3_next import Qwen3Next
from paceline.models.qwen3_vl import Qwen3VL, Qwen3VLMoe

MODELS: Mapping[str, Callable[[ModelConfig, Weights, Kernels], Architecture]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "MinistralForCausalLM": Llama,
    "Ministral3ForCausalLM": Llama,
    "Mistral3ForConditionalGeneration": Llama,
    "Qwen2ForCausalLM": Llama,
    "Qwen3ForCausalLM": partial(Llama, head_norms=True),
    "SmolLM3ForCausalLM": Llama,
    "GptOssForCausalLM": GptOss,
    "Gemma3ForCausalLM": Gemma3,
    "Gemma3ForConditionalGeneration": Gemma3,
    "DeepseekV2ForCausalLM": Deepseek,
    "DeepseekV3ForCausalLM": Deepseek,
    "GraniteMoeHybridForCausalLM": GraniteHybrid,
    "GraniteMoeForCausalLM": GraniteHybrid,
    "MixtralForCausalLM": Mixtral,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "Gemma4ForCausalLM": Gemma4,
    "Gemma4ForConditionalGeneration": Gemma4,
    "Gemma4UnifiedForCausalLM": Gemma4,
    "Gemma4UnifiedForConditionalGeneration": Gemma4,
    "Qwen3NextForCausalLM": Qwen3Next,
    "Qwen3_5ForCausalLM": Qwen3Next,
    "Qwen3_5MoeForCausalLM": Qwen3Next,
    "Qwen3_5ForConditionalGeneration": Qwen35WithMedia,
    "Qwen3_5MoeForConditionalGeneration": Qwen35WithMedia,
    "Qwen3VLForConditionalGeneration": Qwen3VL,
    "Qwen3VLMoeForConditionalGeneration": Qwen3VLMoe,
    "ColPaliForRetrieval": partial(Llama, norm_kind=NormKind.UNIT_OFFSET),
    "ColQwen2ForRetrieval": Llama,
}
