"""The check of --kv-cache-dtype and --kv-cache-dtype-skip-layers, before weights are read."""

from __future__ import annotations

from paceline.core.kv_coding import KVCoding
from paceline.core.kv_layout import GroupShape
from paceline.models.model_config import ModelConfig, ModelFacts


def check_kv_coding(coding: KVCoding, model: ModelFacts, drafter: ModelFacts | None) -> None:
    """Raise ConfigError if keys and values of native models cannot have these codes.

    A drafter that is None, and models whose caches are known only after loading, pass.
    """
    for own, config in ((coding, model), (coding.of_drafter(), drafter)):
        # An assistant reads its target's keys and values, and has none of its own.
        if not coding.code or not isinstance(config, ModelConfig) or config.assistant is not None:
            continue
        own.applied(tuple(_shapes(config)))


def _shapes(config: ModelConfig) -> list[GroupShape]:
    """Return a group for each kind of attention."""
    shapes = []
    for kind, attention in config.attention.items():
        own = [layer for layer, other in enumerate(config.layer_types) if other == kind]
        layers = tuple(layer for layer in own if layer not in config.kv_sources)
        planes = 2 if attention.latent is None else 1
        if layers:
            sizes = attention.num_kv_heads, attention.head_dim, attention.window
            shapes.append(GroupShape(str(kind), layers, *sizes, planes=planes))
    return shapes
