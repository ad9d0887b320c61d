"""The config.json of the text models of Qwen 3-VL."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import ModelError
from paceline.models.config.fields import Fields
from paceline.models.config.grids import with_grids
from paceline.models.config.qwen import qwen3
from paceline.models.config.qwen3_moe import qwen3_moe
from paceline.models.model_config import ModelConfig


def qwen3_vl(fields: Fields) -> ModelConfig:
    return _with_media(qwen3(_text(fields)), fields)


def qwen3_vl_moe(fields: Fields) -> ModelConfig:
    text = _text(fields).with_defaults(
        num_key_value_heads=16, num_local_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408
    )
    return _with_media(qwen3_moe(text.changed(norm_topk_prob=True)), fields)


def shown_layers(vision: Fields) -> tuple[int, ...]:
    """Return the layers of the encoder whose results are added in the first layers of the text model."""
    return tuple(int(layer) for layer in vision.get("deepstack_visual_indexes", (8, 16, 24)))


def _text(fields: Fields) -> Fields:
    text = fields.text_part().with_defaults(max_position_embeddings=128_000, rope_theta=500_000.0)
    return text.changed(use_sliding_window=False, layer_types=None)  # these models have no windows


def _with_media(config: ModelConfig, fields: Fields) -> ModelConfig:
    config, vision = with_grids(config, _text(fields), (24, 20, 20)), fields.part("vision_config")
    added = 0 if vision is None else len(shown_layers(vision))
    if added > config.num_layers:
        raise ModelError(f"deepstack_visual_indexes names {added} layers, and the text model has {config.num_layers}")
    return replace(config, deepstack_layers=added)
