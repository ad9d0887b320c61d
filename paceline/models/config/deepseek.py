"""The config.json of DeepSeek V2 and V3: attention over latent vectors, and experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from paceline.core.errors import ModelError
from paceline.core.experts import Routing
from paceline.models.config.fields import Fields, NotNativeError
from paceline.models.model_config import AttentionConfig, Experts, Latent, LayerType, ModelConfig

_LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def deepseek_v2(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(
        **_LATENT,
        max_position_embeddings=2048,
        n_routed_experts=64,
        n_shared_experts=2,
        moe_intermediate_size=1407,
        first_k_dense_replace=0,
    )
    if fields.get("norm_topk_prob", False):
        raise NotNativeError(f"norm_topk_prob is not supported for {fields.architecture}")
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise NotNativeError(f"topk_method {method} is not supported; supported are: greedy, group_limited_greedy")
    limited = method == "group_limited_greedy"
    routing = Routing(
        fields.size("num_experts_per_tok"),
        groups=fields.size("n_group") if limited else 1,
        top_groups=fields.size("topk_group") if limited else 1,
        factor=fields.number("routed_scaling_factor", 1.0),
    )
    return replace(_deepseek(fields, routing), mlp_bias=fields.flag("mlp_bias", False))


def deepseek_v3(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(
        **_LATENT,
        max_position_embeddings=4096,
        n_routed_experts=256,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
    )
    method, scores = fields.get("topk_method", "noaux_tc"), fields.get("scoring_func", "sigmoid")
    if (method, scores) != ("noaux_tc", "sigmoid"):
        raise NotNativeError(f"topk_method {method} with scoring_func {scores} is not supported")
    routing = Routing(
        fields.size("num_experts_per_tok", 8),
        scores="sigmoid",
        normalize=fields.flag("norm_topk_prob", True),
        groups=fields.size("n_group", 8),
        top_groups=fields.size("topk_group", 4),
        group_score="top2",
        factor=fields.number("routed_scaling_factor", 2.5),
    )
    # transformers 5 writes `num_mtp_layers`.
    unused = fields.count("num_nextn_predict_layers", fields.count("num_mtp_layers", 0))
    return replace(_deepseek(fields, routing), unused_layers=unused)


def _deepseek(fields: Fields, routing: Routing) -> ModelConfig:
    """Return the configuration of a model of either version, whose defaults are among the fields."""
    if fields.get("attention_bias", False):
        raise NotNativeError(f"attention_bias is not supported for {fields.architecture}")
    if fields.size("moe_layer_freq", 1) != 1:
        raise NotNativeError("layers without experts between those with experts (moe_layer_freq) are not supported")
    layers, full = fields.size("num_hidden_layers"), _full(fields)
    kind: LayerType = "full"
    activation = fields.activation("hidden_act", "silu")
    dense_layers = frozenset(range(min(layers, fields.count("first_k_dense_replace", 0))))
    return ModelConfig(
        **fields.common(),
        activation=activation,
        layer_types=(kind,) * layers,
        attention={kind: full},
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position=fields.size("max_position_embeddings"),
        experts=None
        if len(dense_layers) == layers
        else Experts(
            count=fields.size("n_routed_experts"),
            inner_size=fields.size("moe_intermediate_size"),
            routing=routing,
            activation=activation,
            shared_size=fields.count("n_shared_experts", 0) * fields.size("moe_intermediate_size"),
            dense_layers=dense_layers,
        ),
    )


def _full(fields: Fields) -> AttentionConfig:
    latent = Latent(
        rank=fields.size("kv_lora_rank"),
        query_rank=0 if fields.raw["q_lora_rank"] is None else fields.size("q_lora_rank"),
        plain_dim=fields.size("qk_nope_head_dim"),
        rotated_dim=fields.size("qk_rope_head_dim"),
        value_dim=fields.size("v_head_dim"),
    )
    if latent.rotated_dim % 2:
        raise ModelError(f"qk_rope_head_dim must be even, not {latent.rotated_dim}")
    rope = fields.rope(10_000.0, fields.size("max_position_embeddings"))
    return AttentionConfig(
        num_heads=fields.size("num_attention_heads"),
        num_kv_heads=1,
        head_dim=latent.rank + latent.rotated_dim,
        scale=(latent.plain_dim + latent.rotated_dim) ** -0.5 * _scale_of_yarn(fields),
        rope=replace(rope, interleaved=fields.flag("rope_interleave", True)),
        latent=latent,
    )


def _scale_of_yarn(fields: Fields) -> float:
    """Return the factor on attention scores by which YaRN makes up for longer contexts."""
    parameters: Any = fields.rope_parameters()
    weight = float(parameters.get("mscale_all_dim") or 0.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    factor = float(parameters.get("factor") or 1.0)
    if kind == "default" or not weight or factor <= 1:
        return 1.0
    return (0.1 * weight * math.log(factor) + 1.0) ** 2
