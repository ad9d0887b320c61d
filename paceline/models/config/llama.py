"""Llama 2 and 3, SmolLM2 and others with this architecture."""

from __future__ import annotations

from paceline.core.errors import ModelError
from paceline.models.config.fields import Fields
from paceline.models.model_config import AttentionConfig, LayerType, ModelConfig


def llama(fields: Fields) -> ModelConfig:
    full: LayerType = "full"
    heads, bias = fields.size("num_attention_heads"), bool(fields.get("attention_bias", False))
    head_dim = fields.size("head_dim", fields.size("hidden_size") // heads)
    max_position = fields.size("max_position_embeddings", 2048)
    if any(kind != "full_attention" for kind in fields.get("layer_types", ())):
        raise ModelError(f"layer_types other than full_attention are not supported for {fields.architecture}")
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=fields.rope(10_000.0, max_position),
        bias=bias,
        output_bias=bias,
    )
    return ModelConfig(
        **fields.common(),
        activation=fields.activation("hidden_act", "silu"),
        layer_types=(full,) * fields.size("num_hidden_layers"),
        attention={full: attention},
        mlp_bias=bool(fields.get("mlp_bias", False)),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_position=max_position,
    )
