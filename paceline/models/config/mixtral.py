"""Mixtral."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import ModelError
from paceline.core.experts import Routing
from paceline.models.config.fields import Fields
from paceline.models.config.llama import llama
from paceline.models.model_config import Experts, ModelConfig

_ROPE_THETA = 1_000_000.0


def mixtral(fields: Fields) -> ModelConfig:
    if fields.raw.get("sliding_window"):
        raise ModelError(f"a sliding_window is not supported for {fields.architecture}")
    dense = llama(replace(fields, raw={"rope_theta": _ROPE_THETA, **fields.raw}))
    return replace(
        dense,
        norm_eps=float(fields.get("rms_norm_eps", 1e-5)),
        experts=Experts(
            count=fields.size("num_local_experts", 8),
            inner_size=dense.intermediate_size,
            routing=Routing(fields.size("num_experts_per_tok", 2), normalize=True),
            activation=dense.activation,
        ),
    )
