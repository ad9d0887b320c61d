"""The registry of encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.core.media import MediaKind
from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.encoder_config import (
    EncodersConfig,
    Gemma4AudioConfig,
    Gemma4VisionConfig,
    PatchEmbedderConfig,
    Qwen2VisionConfig,
    Qwen3VisionConfig,
    SampleEmbedderConfig,
    SiglipConfig,
)
from paceline.models.encoders.base import Encoder, Encoders
from paceline.models.encoders.gemma4_audio import Gemma4Audio
from paceline.models.encoders.gemma4_unified import PatchEmbedder, SampleEmbedder
from paceline.models.encoders.gemma4_vision import Gemma4Vision
from paceline.models.encoders.qwen2_vision import Qwen2Vision
from paceline.models.encoders.qwen3_vision import Qwen3Vision
from paceline.models.encoders.siglip import Siglip

_ENCODERS: Mapping[type, Callable[[Any, int, Weights, Kernels], Encoder]] = {
    Gemma4VisionConfig: Gemma4Vision,
    Gemma4AudioConfig: Gemma4Audio,
    PatchEmbedderConfig: PatchEmbedder,
    SampleEmbedderConfig: SampleEmbedder,
    SiglipConfig: Siglip,
    Qwen3VisionConfig: Qwen3Vision,
    Qwen2VisionConfig: Qwen2Vision,
}


def make_encoders(
    config: EncodersConfig, dtype: torch.dtype, device: torch.device, weights: Weights, kernels: Kernels
) -> Encoders:
    """Return a model's encoders, with the weights of a checkpoint in `dtype` on `device`."""
    by_kind: dict[MediaKind, Encoder] = {}
    if config.vision is not None:
        vision = _ENCODERS[type(config.vision)](config.vision, config.hidden_size, weights, kernels)
        kinds = (MediaKind.IMAGE, MediaKind.VIDEO_FRAME) if config.frames else (MediaKind.IMAGE,)
        by_kind |= dict.fromkeys(kinds, vision)
    if config.audio is not None:
        by_kind[MediaKind.AUDIO] = _ENCODERS[type(config.audio)](config.audio, config.hidden_size, weights, kernels)
    return Encoders(by_kind, config.row_size, dtype, device)
