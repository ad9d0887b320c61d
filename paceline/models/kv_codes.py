"""The check of --kv-cache-dtype, before weights are read."""

from __future__ import annotations

from paceline.core.config import KVCacheDType
from paceline.core.kv_layout import GroupShape
from paceline.models.model_config import ModelConfig, ModelFacts


def check_kv_cache_dtype(kv_cache_dtype: KVCacheDType, *models: ModelFacts | None) -> None:
    """Raise ConfigError if keys and values of native models cannot have this type.

    models: a model and its draft model. None, and models whose caches are known only after loading, pass.
    """
    for model in models:
        # An assistant reads its target's keys and values, and has none of its own.
        if kv_cache_dtype == "auto" or not isinstance(model, ModelConfig) or model.assistant is not None:
            continue
        for attention in model.attention.values():
            planes = 2 if attention.latent is None else 1
            GroupShape("any", (0,), attention.num_kv_heads, attention.head_dim, planes=planes).coded(kv_cache_dtype)
