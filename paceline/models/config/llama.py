"""The config.json of Llama 2 and 3, SmolLM2, SmolLM3 and other models with Llama's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.errors import ModelError
from paceline.models.config.fields import LAYER_TYPES, Fields, NotNativeError, read_layer_types
from paceline.models.model_config import AttentionConfig, LayerType, ModelConfig


def llama(fields: Fields) -> ModelConfig:
    if any(kind != "full_attention" for kind in fields.get("layer_types", ())):
        raise NotNativeError(f"layer_types other than full_attention are not supported for {fields.architecture}")
    bias = fields.flag("attention_bias", False)
    config = llama_like(fields, ["full"] * fields.size("num_hidden_layers"), bias, bias)
    return replace(config, mlp_bias=fields.flag("mlp_bias", False))


def smollm3(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(
        max_position_embeddings=32_768, rope_theta=2_000_000.0, tie_word_embeddings=True, num_key_value_heads=4
    )
    config = llama(fields)
    if fields.get("use_sliding_window", False) and fields.raw.get("sliding_window") is not None:
        raise NotNativeError(f"use_sliding_window is not supported for {fields.architecture}")
    interval, layers = fields.size("no_rope_layer_interval", 4), config.num_layers
    rotates = fields.get("no_rope_layers", [(layer + 1) % interval for layer in range(layers)])
    if len(rotates) != layers:
        raise ModelError(f"no_rope_layers describes {len(rotates)} layers, num_hidden_layers is {layers}")
    types: list[LayerType] = ["full" if rotated else "nope" for rotated in rotates]
    full = config.attention["full"]
    return replace(config, layer_types=tuple(types), attention={"full": full, "nope": replace(full, rope=None)})


def llama_like(
    fields: Fields, layer_types: Sequence[LayerType], bias: bool = False, output_bias: bool = False
) -> ModelConfig:
    """Return the configuration of a model that has Llama's layers, some of which may attend to a window.

    bias, output_bias: values of these fields of `AttentionConfig`.
    """
    heads = fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", fields.size("hidden_size") // heads)
    max_position = fields.size("max_position_embeddings", 2048)
    rope = fields.rope(10_000.0, max_position)
    full = AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        bias=bias,
        output_bias=output_bias,
    )
    attention: dict[LayerType, AttentionConfig] = {"full": full}
    if "sliding" in layer_types:
        attention["sliding"] = replace(full, window=fields.size("sliding_window"))
    return ModelConfig(
        **fields.common(),
        activation=fields.activation("hidden_act", "silu"),
        layer_types=tuple(layer_types),
        attention=attention,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position=max(max_position, rope.longest_context),
    )


def full_or_sliding(fields: Fields, default: Sequence[LayerType]) -> Sequence[LayerType]:
    """Return the types of layers that attend to all tokens or to a window; `default` if `layer_types` is missing."""
    names = fields.raw.get("layer_types")
    return default if names is None else read_layer_types(names, LAYER_TYPES, fields.size("num_hidden_layers"))
