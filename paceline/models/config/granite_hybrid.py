"""The config.json of the hybrid models of Granite 4: Mamba-2 and attention, with or without experts."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.core.errors import ModelError
from paceline.core.experts import Routing
from paceline.models.config.fields import Fields, NotNativeError, read_layer_types
from paceline.models.model_config import AttentionConfig, Experts, LayerType, Mamba, ModelConfig

_LAYER_TYPES: Mapping[str, LayerType] = {
    "full_attention": "full",
    "attention": "full",
    "linear_attention": "mamba",
    "mamba": "mamba",
}


def granite_experts(fields: Fields, shared_size: int) -> Experts:
    """Return the experts of any Granite. Their weights are a softmax over the chosen experts' logits."""
    return Experts(
        count=fields.size("num_local_experts", 8),
        inner_size=fields.size("intermediate_size"),
        routing=Routing(fields.size("num_experts_per_tok", 2), normalize=True),
        activation=fields.activation("hidden_act", "silu"),
        shared_size=shared_size,
    )


def granite_scale(fields: Fields, head_dim: int) -> float:
    """Return the factor on attention scores. If config.json has null, this is the usual factor, head_dim ** -0.5."""
    is_null = "attention_multiplier" in fields.raw and fields.raw["attention_multiplier"] is None
    return head_dim**-0.5 if is_null else fields.number("attention_multiplier", 1.0)


def granite_hybrid(fields: Fields) -> ModelConfig:
    layers, heads = fields.size("num_hidden_layers"), fields.size("num_attention_heads")
    names = fields.get("layer_types", fields.get("layers_block_type", ["mamba"] * layers))
    position = fields.get("position_embedding_type", "nope")
    if position not in ("nope", "rope"):
        raise NotNativeError(f"position_embedding_type {position} is not supported; supported are: nope, rope")
    max_position = fields.size("max_position_embeddings", 2048)
    rope, bias = fields.rope(10_000.0, max_position), fields.flag("attention_bias", False)
    head_dim = fields.size("head_dim", fields.size("hidden_size") // heads)
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=granite_scale(fields, head_dim),
        rope=rope if position == "rope" else None,
        bias=bias,
        output_bias=bias,
    )
    shared_size = fields.size("shared_intermediate_size", 1024)
    return ModelConfig(
        **fields.changed(intermediate_size=shared_size).common(),
        activation=fields.activation("hidden_act", "silu"),
        layer_types=read_layer_types(names, _LAYER_TYPES, layers),
        attention={"full": attention},
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position=max_position,
        mamba=_mamba(fields),
        experts=granite_experts(fields, shared_size) if fields.get("num_local_experts", 8) else None,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )


def _mamba(fields: Fields) -> Mamba:
    heads, inner = fields.size("mamba_n_heads", 128), fields.size("mamba_expand", 2) * fields.size("hidden_size")
    automatic = fields.get("mamba_d_head", "auto") == "auto"
    head_dim = inner // heads if automatic else fields.size("mamba_d_head")
    if heads * head_dim != inner:
        raise ModelError(f"mamba_n_heads ({heads}) times mamba_d_head ({head_dim}) must be {inner}")
    if fields.size("mamba_n_groups", 1) != 1:
        raise NotNativeError("Mamba heads in more than one group (mamba_n_groups) are not supported")
    least, most = fields.get("time_step_limit", (0.0, math.inf))
    if isinstance(most, Mapping):  # how transformers writes numbers that JSON cannot, such as Infinity
        most = float(most.get("__float__", 0.0))
    if (least, most) != (0.0, math.inf):
        raise NotNativeError("limits of Mamba's time steps (time_step_limit) are not supported")
    if fields.activation("hidden_act", "silu") != "silu":
        raise ModelError("Mamba layers need hidden_act silu")
    return Mamba(
        heads=heads,
        head_dim=head_dim,
        state_size=fields.size("mamba_d_state", 256),
        conv_taps=fields.size("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
    )
