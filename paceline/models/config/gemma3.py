"""The config.json of the text models of Gemma 3."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import ModelError
from paceline.models.config.fields import LAYER_TYPES, Fields, Json, read_layer_types, read_rope
from paceline.models.model_config import AttentionConfig, LayerType, ModelConfig


def gemma3(fields: Fields) -> ModelConfig:
    has_images = fields.architecture == "Gemma3ForConditionalGeneration"
    # The text part of published models for images says only what differs from these sizes.
    fields = fields.text_part().with_defaults(vocab_size=262_208, hidden_size=2304, intermediate_size=9216)
    fields = fields.with_defaults(num_hidden_layers=26, num_attention_heads=8)
    layer_types = _layer_types(fields)
    max_position = fields.size("max_position_embeddings", 131_072)
    full_rope, sliding_rope = _ropes(fields)
    bias, bidirectional = fields.flag("attention_bias", False), fields.flag("use_bidirectional_attention", False)
    window = fields.size("sliding_window", 4096)
    full = AttentionConfig(
        num_heads=fields.size("num_attention_heads"),
        num_kv_heads=fields.size("num_key_value_heads", 4),
        head_dim=fields.size("head_dim", 256),
        scale=fields.positive("query_pre_attn_scalar", 256) ** -0.5,
        rope=read_rope(full_rope, 1_000_000.0, max_position),
        bias=bias,
        output_bias=bias,
        looks_ahead=has_images or bidirectional,
        both_sides=bidirectional,
    )
    sliding = replace(
        full,
        window=window // 2 + 1 if bidirectional else window,  # config.json has the tokens on both sides together
        rope=read_rope(sliding_rope, 10_000.0, max_position),
    )
    return ModelConfig(
        **fields.common(),
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        layer_types=layer_types,
        attention={"full": full, "sliding": sliding},
        bidirectional=bidirectional,
        logit_softcap=fields.number("final_logit_softcapping", 0.0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        max_position=max_position,
    )


def _ropes(fields: Fields) -> tuple[Json, Json]:
    """Return the rope parameters of full and of sliding layers. transformers 4 wrote them as fields of their own."""
    given = fields.get("rope_parameters", {})
    if not set(given) <= set(LAYER_TYPES):
        raise ModelError(f"rope_parameters must name the layer types {', '.join(LAYER_TYPES)}, not {', '.join(given)}")
    full, sliding = (given.get(name) or {} for name in ("full_attention", "sliding_attention"))
    full = {"rope_theta": fields.raw.get("rope_theta"), **full, **(fields.raw.get("rope_scaling") or {})}
    return full, {"rope_theta": fields.raw.get("rope_local_base_freq"), **sliding}


def _layer_types(fields: Fields) -> tuple[LayerType, ...]:
    layers = fields.size("num_hidden_layers")
    names = fields.raw.get("layer_types")
    if names is None:
        # Before transformers 5, this is the distance between layers with full attention.
        pattern = fields.size("sliding_window_pattern", fields.size("_sliding_window_pattern", 6))
        return tuple("sliding" if (layer + 1) % pattern else "full" for layer in range(layers))
    return read_layer_types(names, LAYER_TYPES, layers)
