"""The config.json of Mixtral."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.experts import Routing
from paceline.models.config.fields import Fields
from paceline.models.config.mistral import mistral_like
from paceline.models.model_config import Experts, ModelConfig


def mixtral(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(max_position_embeddings=131_072, rope_theta=1_000_000.0, rms_norm_eps=1e-5)
    # Its code gives all layers the same window, whatever `layer_types` says.
    dense = mistral_like(fields.changed(layer_types=None))
    return replace(
        dense,
        experts=Experts(
            count=fields.size("num_local_experts", 8),
            inner_size=dense.intermediate_size,
            routing=Routing(fields.size("num_experts_per_tok", 2), normalize=True),
            activation=dense.activation,
        ),
    )
