"""The config.json of GPT-OSS."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.experts import Routing
from paceline.models.config.fields import Fields, NotNativeError
from paceline.models.config.llama import full_or_sliding, llama_like
from paceline.models.model_config import Experts, LayerType, ModelConfig

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def gpt_oss(fields: Fields) -> ModelConfig:
    fields = fields.with_rope(_ROPE).with_defaults(
        head_dim=64,
        num_key_value_heads=8,
        sliding_window=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
        torch_dtype="bfloat16",  # published files do not name the dtype
    )
    for name, value in _SWIGLU.items():
        if fields.get(name, value) != value:
            raise NotNativeError(f"{name} {fields.raw[name]} is not supported; supported is {value}")
    layers = range(fields.size("num_hidden_layers"))
    default: list[LayerType] = ["full" if layer % 2 else "sliding" for layer in layers]
    bias = fields.flag("attention_bias", True)
    config = llama_like(fields, full_or_sliding(fields, default), bias, bias)
    return replace(
        config,
        attention={kind: replace(attention, sinks=True) for kind, attention in config.attention.items()},
        experts=Experts(
            count=fields.size("num_local_experts", 128),
            inner_size=config.intermediate_size,
            routing=Routing(fields.size("num_experts_per_tok", 4), normalize=True),
            activation="clamped_swiglu",
            bias=True,
        ),
    )
