"""The part of config.json about encoders, for models that read images, videos or audio."""

from __future__ import annotations

import math

from paceline.core.errors import ModelError
from paceline.models.config.fields import Fields
from paceline.models.config.gemma3 import gemma3
from paceline.models.config.gemma4 import gemma4
from paceline.models.config.qwen3_vl import shown_layers
from paceline.models.encoder_config import (
    EncodersConfig,
    Gemma4AudioConfig,
    Gemma4VisionConfig,
    PatchEmbedderConfig,
    Qwen3VisionConfig,
    SampleEmbedderConfig,
    SiglipConfig,
)


def gemma3_encoders(fields: Fields) -> EncodersConfig:
    vision = fields.part("vision_config")
    return EncodersConfig(
        hidden_size=gemma3(fields).hidden_size,
        vision=None if vision is None else siglip(vision, fields.size("mm_tokens_per_image", 256)),
        audio=None,
        frames=False,
    )


def gemma4_encoders(fields: Fields) -> EncodersConfig:
    vision, audio = fields.part("vision_config"), fields.part("audio_config")
    return EncodersConfig(
        hidden_size=gemma4(fields).hidden_size,
        vision=None if vision is None else _gemma4_vision(vision),
        audio=None if audio is None else _gemma4_audio(audio),
        frames=True,
    )


def gemma4_unified_encoders(fields: Fields) -> EncodersConfig:
    vision, audio = fields.part("vision_config"), fields.part("audio_config")
    return EncodersConfig(
        hidden_size=gemma4(fields).hidden_size,
        vision=None if vision is None else _patch_embedder(vision),
        audio=None if audio is None else SampleEmbedderConfig(audio.size("audio_embed_dim", 640), _eps(audio)),
        frames=True,
    )


def qwen3_5_encoders(fields: Fields) -> EncodersConfig:
    """Return the encoder of Qwen 3-VL without deepstack."""
    if (vision := fields.part("vision_config")) is not None:
        fields = fields.changed(vision_config=vision.changed(deepstack_visual_indexes=()).raw)
    return qwen3_vl_encoders(fields)


def qwen3_vl_encoders(fields: Fields) -> EncodersConfig:
    hidden_size, vision = fields.text_part().size("hidden_size"), fields.part("vision_config")
    return EncodersConfig(
        hidden_size=hidden_size,
        vision=None if vision is None else _qwen3_vision(vision, hidden_size),
        audio=None,
        frames=True,
    )


def _qwen3_vision(fields: Fields, text_size: int) -> Qwen3VisionConfig:
    need(fields, "hidden_act", "gelu_pytorch_tanh")
    if (found := fields.size("out_hidden_size", 3584)) != text_size:
        raise ModelError(f"vision_config: out_hidden_size is {found}, and the text model's hidden_size {text_size}")
    hidden, heads, layers = fields.size("hidden_size", 1152), fields.size("num_heads", 16), fields.size("depth", 27)
    if hidden % heads or hidden // heads % 4:
        raise ModelError(f"vision_config: hidden_size {hidden} must be a multiple of four times {heads} heads")
    positions = fields.size("num_position_embeddings", 2304)
    if (side := math.isqrt(positions)) ** 2 != positions:
        raise ModelError(f"vision_config: num_position_embeddings must be the square of a number, not {positions}")
    shown = shown_layers(fields)
    if len(set(shown)) < len(shown) or not all(0 <= layer < layers for layer in shown):
        raise ModelError(f"vision_config: deepstack_visual_indexes must be different layers of {layers}, not {shown}")
    return Qwen3VisionConfig(
        layers=layers,
        hidden_size=hidden,
        inner_size=fields.size("intermediate_size", 4304),
        heads=heads,
        patch_side=fields.size("patch_size", 16),
        patch_frames=fields.size("temporal_patch_size", 2),
        merged_side=fields.size("spatial_merge_size", 2),
        positions_side=side,
        shown_layers=shown,
        rope_theta=float((fields.raw.get("rope_parameters") or {}).get("rope_theta") or 10_000.0),
    )


def _gemma4_vision(fields: Fields) -> Gemma4VisionConfig:
    need(fields, "hidden_activation", "gelu_pytorch_tanh")
    heads = fields.size("num_attention_heads", 12)
    if fields.size("num_key_value_heads", heads) != heads:
        raise ModelError("vision_config: num_key_value_heads must be num_attention_heads")
    if fields.get("attention_bias", False):
        raise ModelError("vision_config: attention_bias is not supported")
    head_dim = fields.size("head_dim", 64)
    if head_dim % 4:
        raise ModelError(f"vision_config: head_dim must be a multiple of 4 for two rotary embeddings, not {head_dim}")
    return Gemma4VisionConfig(
        layers=fields.size("num_hidden_layers", 16),
        hidden_size=fields.size("hidden_size", 768),
        inner_size=fields.size("intermediate_size", 3072),
        heads=heads,
        head_dim=head_dim,
        patch_side=fields.size("patch_size", 16),
        pooled_side=fields.size("pooling_kernel_size", 3),
        positions=fields.size("position_embedding_size", 10_240),
        rope_theta=float((fields.raw.get("rope_parameters") or {}).get("rope_theta") or 100.0),
        norm_eps=_eps(fields),
        clipped=fields.flag("use_clipped_linears", False),
        standardized=fields.flag("standardize", False),
    )


def _gemma4_audio(fields: Fields) -> Gemma4AudioConfig:
    need(fields, "hidden_act", "silu")
    window = fields.size("attention_context_left", 13) - 1
    if fields.size("attention_chunk_size", 12) != window or fields.count("attention_context_right", 0):
        raise ModelError(
            "audio_config: attention_chunk_size must be attention_context_left - 1, and attention_context_right 0"
        )
    hidden, heads = fields.size("hidden_size", 1024), fields.size("num_attention_heads", 8)
    if hidden % heads or hidden % 2:
        raise ModelError(f"audio_config: hidden_size {hidden} must be even, and a multiple of {heads} heads")
    first, second = (int(count) for count in fields.get("subsampling_conv_channels", (128, 32)))
    if first % 4:
        raise ModelError(f"audio_config: the first of subsampling_conv_channels must be a multiple of 4, not {first}")
    return Gemma4AudioConfig(
        layers=fields.size("num_hidden_layers", 12),
        hidden_size=hidden,
        heads=heads,
        features=first,  # as the projection behind the convolutions is sized
        channels=(first, second),
        conv_taps=fields.size("conv_kernel_size", 5),
        window=window,
        score_cap=fields.number("attention_logit_cap", 50.0),
        residual_weight=fields.number("residual_weight", 0.5),
        limit=fields.number("gradient_clipping", 1e10),
        output_size=fields.size("output_proj_dims", 1536),
        norm_eps=_eps(fields),
        clipped=fields.flag("use_clipped_linears", True),
    )


def _patch_embedder(fields: Fields) -> PatchEmbedderConfig:
    return PatchEmbedderConfig(
        patch_side=fields.size("patch_size", 16) * fields.size("pooling_kernel_size", 3),
        hidden_size=fields.size("mm_embed_dim", 3840),
        positions=fields.size("mm_posemb_size", 1120),
        norm_eps=_eps(fields),
    )


def siglip(fields: Fields, rows: int) -> SiglipConfig:
    """Return the configuration of SigLIP, whose patches become this number of rows."""
    need(fields, "hidden_act", "gelu_pytorch_tanh")
    hidden, heads = fields.size("hidden_size", 768), fields.size("num_attention_heads", 12)
    if hidden % heads:
        raise ModelError(f"vision_config: hidden_size {hidden} must be a multiple of {heads} heads")
    image_side, patch_side = fields.size("image_size", 224), fields.size("patch_size", 16)
    rows_side = math.isqrt(rows)
    if image_side % patch_side or rows_side**2 != rows or image_side // patch_side % rows_side:
        raise ModelError(
            f"mm_tokens_per_image {rows} must be the square of a number that divides the patches of a side, "
            f"of which an image of {image_side} pixels with patches of {patch_side} must have a whole number"
        )
    return SiglipConfig(
        layers=fields.size("num_hidden_layers", 12),
        hidden_size=hidden,
        inner_size=fields.size("intermediate_size", 3072),
        heads=heads,
        image_side=image_side,
        patch_side=patch_side,
        rows_side=rows_side,
        norm_eps=fields.number("layer_norm_eps", 1e-6),
    )


def _eps(fields: Fields) -> float:
    return fields.number("rms_norm_eps", 1e-6)


def need(fields: Fields, name: str, known: str) -> None:
    """Raise ModelError if a field has another value than the one that the encoder computes."""
    if fields.get(name, known) != known:
        raise ModelError(f"the encoder's {name} must be {known}, not {fields.raw[name]!r}")
