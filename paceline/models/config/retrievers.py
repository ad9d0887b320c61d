"""The config.json of ColPali and ColQwen2 in the form of transformers, whose parts are inside `vlm_config`."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import ModelError
from paceline.models.config.encoders import need, siglip
from paceline.models.config.fields import Fields, NotNativeError
from paceline.models.config.llama import llama_like
from paceline.models.config.qwen import qwen2
from paceline.models.encoder_config import EncodersConfig, Qwen2VisionConfig
from paceline.models.model_config import ModelConfig


def colpali(fields: Fields) -> ModelConfig:
    """Gemma, whose tokens all see each other."""
    text = _text(fields).with_defaults(
        vocab_size=256_000, hidden_size=3072, intermediate_size=24_576, num_hidden_layers=28, num_attention_heads=16
    )
    text = text.with_defaults(num_key_value_heads=16, head_dim=256, tie_word_embeddings=True)
    text = text.with_defaults(max_position_embeddings=8192)
    if text.get("hidden_act", "gelu") not in ("gelu", "gelu_pytorch_tanh"):
        raise NotNativeError(f"hidden_act {text.raw['hidden_act']!r:.80} is not supported for ColPali")
    bias = text.flag("attention_bias", False)
    layers = ["full"] * text.size("num_hidden_layers")
    config = llama_like(text.changed(hidden_act="gelu_pytorch_tanh"), layers, bias, bias)  # type: ignore[arg-type]
    full = replace(config.attention["full"], looks_ahead=True)
    scale = config.hidden_size**0.5
    return replace(config, attention={"full": full}, bidirectional=True, embedding_multiplier=scale)


def colqwen2(fields: Fields) -> ModelConfig:
    """Qwen 2. As in transformers, a token of an image has one position, and not three as in Qwen 2-VL."""
    text = _text(fields)
    rope = {**text.rope_parameters(), "rope_type": "default", "type": "default"}
    return qwen2(text.changed(rope_scaling=None, rope_parameters=rope))


def colpali_encoders(fields: Fields) -> EncodersConfig:
    vision = _part(fields, "vision_config")
    patches = (vision.size("image_size", 224) // vision.size("patch_size", 16)) ** 2
    return EncodersConfig(
        hidden_size=colpali(fields).hidden_size,
        vision=replace(siglip(vision, patches), pooled=False),
        audio=None,
        frames=False,
    )


def colqwen2_encoders(fields: Fields) -> EncodersConfig:
    vision, text_size = _part(fields, "vision_config"), colqwen2(fields).hidden_size
    need(vision, "hidden_act", "quick_gelu")
    size, heads = vision.size("embed_dim", 1280), vision.size("num_heads", 16)
    if size % heads or size // heads % 4:
        raise ModelError(f"vision_config: embed_dim {size} must be a multiple of four times {heads} heads")
    if (found := vision.size("hidden_size", 3584)) != text_size:
        raise ModelError(f"vision_config: hidden_size is {found}, and that of the text model {text_size}")
    theta = (vision.raw.get("rope_parameters") or {}).get("rope_theta") or 10_000.0
    encoder = Qwen2VisionConfig(
        layers=vision.size("depth", 32),
        hidden_size=size,
        inner_size=int(size * vision.positive("mlp_ratio", 4.0)),
        heads=heads,
        patch_side=vision.size("patch_size", 14),
        patch_frames=vision.size("temporal_patch_size", 2),
        merged_side=vision.size("spatial_merge_size", 2),
        rope_theta=float(theta),
    )
    return EncodersConfig(hidden_size=text_size, vision=encoder, audio=None, frames=False)


def _text(fields: Fields) -> Fields:
    return _part(fields).text_part()


def _part(fields: Fields, name: str = "") -> Fields:
    """Return the fields of the model inside, or of a part of it. Raises ModelError if they are missing."""
    found = fields.part("vlm_config")
    if found is not None and name:
        found = found.part(name)
    if found is None:
        raise ModelError(f"vlm_config{f'.{name}' if name else ''} is missing")
    return found
