"""The config.json of the models of Qwen 3 with experts."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.experts import Routing
from paceline.models.config.fields import Fields
from paceline.models.config.llama import llama_like
from paceline.models.model_config import Experts, LayerType, ModelConfig


def qwen3_moe(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(max_position_embeddings=32_768, num_key_value_heads=4, sliding_window=4096)
    if not fields.get("use_sliding_window", False):
        fields = fields.changed(sliding_window=None)
    bias = fields.flag("attention_bias", False)
    layer: LayerType = "full" if fields.raw["sliding_window"] is None else "sliding"
    dense = llama_like(fields, [layer] * fields.size("num_hidden_layers"), bias, bias)
    step, never = fields.size("decoder_sparse_step", 1), set(fields.get("mlp_only_layers", ()))
    return replace(
        dense,
        experts=Experts(
            # transformers 5 writes Mixtral's name.
            count=fields.size("num_experts", fields.size("num_local_experts", 128)),
            inner_size=fields.size("moe_intermediate_size", 768),
            routing=Routing(fields.size("num_experts_per_tok", 8), normalize=fields.flag("norm_topk_prob", False)),
            activation=dense.activation,
            dense_layers=frozenset(layer for layer in range(dense.num_layers) if layer in never or (layer + 1) % step),
        ),
    )
