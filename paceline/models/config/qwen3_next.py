"""The config.json of Qwen3-Next and the text models of Qwen 3.5: gated delta nets and attention, with or without
experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.core.errors import ModelError
from paceline.core.experts import Routing
from paceline.core.pooling_retrievers import attention_contract
from paceline.models.config.fields import Fields, read_layer_types
from paceline.models.config.grids import with_grids
from paceline.models.model_config import AttentionConfig, DeltaNet, Experts, LayerType, ModelConfig

_LAYER_TYPES: Mapping[str, LayerType] = {"full_attention": "full", "linear_attention": "delta"}


def qwen3_next(fields: Fields) -> ModelConfig:
    experts = None
    if fields.get("num_experts", 512) != 0:
        step, never = fields.size("decoder_sparse_step", 1), set(fields.get("mlp_only_layers", ()))
        layers = range(fields.size("num_hidden_layers"))
        dense = frozenset(layer for layer in layers if layer in never or (layer + 1) % step)
        experts = _experts(fields, 512, 10, fields.flag("norm_topk_prob", True), dense)
    return _model(fields, experts, grouped=True)


def qwen3_5(fields: Fields) -> ModelConfig:
    text, experts = fields.text_part(), None
    if "Moe" in fields.architecture:
        experts = _experts(text, 256, 8, True, frozenset())
        # All architectures need this field, but no layer here has an MLP of this size.
        text = text.changed(intermediate_size=experts.shared_size)
    config = _model(text, experts, grouped=False)
    if "ColQwen3_5" in fields.get("architectures", ()) and attention_contract(fields.raw) == "bidirectional":
        full = replace(config.attention["full"], looks_ahead=True)
        config = replace(config, attention={"full": full}, bidirectional=True)
    if fields.part("vision_config") is None:
        return config
    return with_grids(config, text, (11, 11, 10))


def _model(fields: Fields, experts: Experts | None, grouped: bool) -> ModelConfig:
    layers = fields.size("num_hidden_layers")
    interval = fields.size("full_attention_interval", 4)
    pattern = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)]
    max_position, head_dim = fields.size("max_position_embeddings", 32_768), fields.size("head_dim", 256)
    bias = fields.flag("attention_bias", False)
    attention = AttentionConfig(
        num_heads=fields.size("num_attention_heads", 16),
        num_kv_heads=fields.size("num_key_value_heads", 2 if experts else 4),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=fields.rope(10_000.0, max_position, head_dim, part=0.25),
        bias=bias,
        output_bias=bias,
        gated=True,
    )
    return ModelConfig(
        **fields.common(),
        activation=fields.activation("hidden_act", "silu"),
        layer_types=read_layer_types(fields.get("layer_types", pattern), _LAYER_TYPES, layers),
        attention={"full": attention},
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position=max_position,
        delta=_delta(fields, grouped),
        experts=experts,
    )


def _delta(fields: Fields, grouped: bool) -> DeltaNet:
    heads, key_heads = fields.size("linear_num_value_heads", 32), fields.size("linear_num_key_heads", 16)
    if heads % key_heads:
        raise ModelError(
            f"{heads} value heads (linear_num_value_heads) cannot share {key_heads} key heads (linear_num_key_heads) "
            "evenly"
        )
    if fields.activation("hidden_act", "silu") != "silu":
        raise ModelError("layers with linear attention need hidden_act silu")
    return DeltaNet(
        heads=heads,
        key_heads=key_heads,
        key_dim=fields.size("linear_key_head_dim", 128),
        value_dim=fields.size("linear_value_head_dim", 128),
        conv_taps=fields.size("linear_conv_kernel_dim", 4),
        grouped=grouped,
    )


def _experts(fields: Fields, count: int, top_k: int, normalize: bool, dense_layers: frozenset[int]) -> Experts:
    return Experts(
        count=fields.size("num_experts", count),
        inner_size=fields.size("moe_intermediate_size", 512),
        routing=Routing(fields.size("num_experts_per_tok", top_k), normalize=normalize),
        activation=fields.activation("hidden_act", "silu"),
        shared_size=fields.size("shared_expert_intermediate_size", 512),
        dense_layers=dense_layers,
    )
