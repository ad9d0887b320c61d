"""The config.json of Mistral and Ministral."""

from __future__ import annotations

from dataclasses import replace

from paceline.models.config.fields import Fields
from paceline.models.config.llama import full_or_sliding, llama_like
from paceline.models.model_config import AttentionConfig, LayerType, ModelConfig

_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral(fields: Fields) -> ModelConfig:
    """Read Mistral, and Ministral of 2024, some of whose layers attend to all tokens."""
    return mistral_like(fields.with_defaults(max_position_embeddings=131_072, sliding_window=4096))


def ministral3(fields: Fields) -> ModelConfig:
    """Read Ministral 3, whose queries grow with their positions."""
    fields = fields.with_defaults(max_position_embeddings=262_144, head_dim=128, rms_norm_eps=1e-5)
    fields = fields.with_rope(_MINISTRAL3_ROPE)
    config, parameters = mistral_like(fields), fields.rope_parameters()
    growth = float(parameters.get("llama_4_scaling_beta") or 0.0)
    original = int(parameters.get("original_max_position_embeddings") or fields.size("max_position_embeddings"))

    def grown(attention: AttentionConfig) -> AttentionConfig:
        assert attention.rope is not None
        return replace(attention, rope=replace(attention.rope, query_growth=growth, original_max_position=original))

    return replace(config, attention={kind: grown(attention) for kind, attention in config.attention.items()})


def mistral3(fields: Fields) -> ModelConfig:
    """Read the text part of Mistral 3 or Ministral 3 for images."""
    text = fields.text_part()
    return ministral3(text) if text.raw.get("model_type") == "ministral3" else mistral(text)


def mistral_like(fields: Fields) -> ModelConfig:
    """Read a model with Llama's layers, which all attend to a window if `sliding_window` says so."""
    default: LayerType = "full" if fields.raw.get("sliding_window") is None else "sliding"
    layers = fields.size("num_hidden_layers")
    return llama_like(fields.with_defaults(num_key_value_heads=8), full_or_sliding(fields, [default] * layers))
