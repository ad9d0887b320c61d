"""The config.json of the dense text models of Qwen 2, 2.5 and 3."""

from __future__ import annotations

from paceline.models.config.fields import Fields
from paceline.models.config.llama import full_or_sliding, llama_like
from paceline.models.model_config import LayerType, ModelConfig


def qwen2(fields: Fields) -> ModelConfig:
    return _qwen(fields, bias=True, output_bias=False)


def qwen3(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return _qwen(fields.with_defaults(head_dim=128), bias, bias)


def _qwen(fields: Fields, bias: bool, output_bias: bool) -> ModelConfig:
    fields = fields.with_defaults(max_position_embeddings=32_768, num_key_value_heads=32, sliding_window=4096)
    if not fields.get("use_sliding_window", False):
        fields = fields.changed(sliding_window=None)
    first = fields.get("max_window_layers", 28) if fields.raw["sliding_window"] else fields.size("num_hidden_layers")
    layers = range(fields.size("num_hidden_layers"))
    default: list[LayerType] = ["full" if layer < first else "sliding" for layer in layers]
    return llama_like(fields, full_or_sliding(fields, default), bias, output_bias)
