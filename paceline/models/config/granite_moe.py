"""The config.json of the models of Granite 3 with experts."""

from __future__ import annotations

from dataclasses import replace

from paceline.models.config.fields import Fields
from paceline.models.config.granite_hybrid import granite_experts, granite_scale
from paceline.models.config.llama import llama
from paceline.models.model_config import ModelConfig


def granite_moe(fields: Fields) -> ModelConfig:
    dense = llama(fields)
    full = dense.attention["full"]
    attention = replace(full, scale=granite_scale(fields, full.head_dim))
    return replace(
        dense,
        attention={"full": attention},
        experts=granite_experts(fields, shared_size=0),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )
