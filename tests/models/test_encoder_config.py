from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from paceline.core.errors import ModelError
from paceline.models.config import read_encoders
from paceline.models.encoder_config import (
    EncodersConfig,
    Gemma4AudioConfig,
    Gemma4VisionConfig,
    PatchEmbedderConfig,
    SampleEmbedderConfig,
    SiglipConfig,
)
from paceline.services.gateway.planning.media.processors.families import read_processor
from tests.models.configs import GEMMA, GEMMA4

E2B_VISION = Gemma4VisionConfig(16, 768, 3072, 12, 64, 16, 3, 10_240, 100.0, 1e-6, clipped=True, standardized=False)
LARGE_VISION = Gemma4VisionConfig(27, 1152, 4304, 16, 72, 16, 3, 10_240, 100.0, 1e-6, clipped=False, standardized=True)
E2B_AUDIO = Gemma4AudioConfig(12, 1024, 8, 128, (128, 32), 5, 12, 50.0, 0.5, 1e10, 1536, 1e-6, clipped=True)
LARGE = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
}
SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
GEMMA3 = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**GEMMA, "hidden_size": 2560}}


def read(folder: Path, base: dict[str, Any], **changes: Any) -> EncodersConfig | None:
    (folder / "config.json").write_text(json.dumps({**base, **changes}))
    found = read_encoders(folder)
    # The gateway takes just those kinds of items that there is an encoder for.
    processor = read_processor(folder)
    kinds = set[str]()
    if found is not None:
        kinds |= {"image"} if found.vision is not None else set()
        kinds |= {"video"} if found.vision is not None and found.frames else set()
        kinds |= {"audio"} if found.audio is not None else set()
    assert (set() if processor is None else processor.kinds) == kinds
    return found


def test_gemma4(tmp_path: Path) -> None:
    small = read(tmp_path, GEMMA4, vision_config={"use_clipped_linears": True}, audio_config={})
    assert small == EncodersConfig(1536, E2B_VISION, E2B_AUDIO, frames=True)
    assert read(tmp_path, GEMMA4, vision_config=LARGE) == EncodersConfig(1536, LARGE_VISION, None, frames=True)
    assert read(tmp_path, GEMMA4) is None


def test_gemma4_as_transformers_saves_it(tmp_path: Path) -> None:
    config = transformers.Gemma4Config(**GEMMA4, vision_config=LARGE, audio_config={})
    found = read(tmp_path, {**config.to_dict(), "architectures": GEMMA4["architectures"]})
    assert found == EncodersConfig(1536, LARGE_VISION, E2B_AUDIO, frames=True)


def test_gemma4_unified(tmp_path: Path) -> None:
    text = {**GEMMA4["text_config"], "hidden_size_per_layer_input": 0, "hidden_size": 3840}
    base = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": text}
    expected = EncodersConfig(
        3840, PatchEmbedderConfig(48, 3840, 1120, 1e-6), SampleEmbedderConfig(640, 1e-6), frames=True
    )
    assert read(tmp_path, base, vision_config={}, audio_config={}) == expected


def test_gemma3(tmp_path: Path) -> None:
    siglip = SiglipConfig(27, 1152, 4304, 16, 896, 14, 16, 1e-6)
    assert read(tmp_path, GEMMA3, vision_config=SIGLIP) == EncodersConfig(2560, siglip, None, frames=False)


def test_models_of_text_have_none(tmp_path: Path) -> None:
    assert read(tmp_path, GEMMA) is None


@pytest.mark.parametrize(
    ("base", "part", "changes", "message"),
    [
        (GEMMA4, "vision_config", {"hidden_activation": "relu"}, "hidden_activation must be gelu_pytorch_tanh"),
        (GEMMA4, "vision_config", {"num_key_value_heads": 4}, "num_key_value_heads must be num_attention_heads"),
        (GEMMA4, "vision_config", {"attention_bias": True}, "attention_bias is not supported"),
        (GEMMA4, "vision_config", {"head_dim": 66}, "head_dim must be a multiple of 4"),
        (GEMMA4, "vision_config", {"patch_size": "large"}, "patch_size must be a positive whole number"),
        (GEMMA4, "audio_config", {"hidden_act": "relu"}, "hidden_act must be silu"),
        (GEMMA4, "audio_config", {"attention_context_right": 2}, "attention_context_right 0"),
        (GEMMA4, "audio_config", {"attention_context_left": 9}, "attention_chunk_size must be"),
        (GEMMA4, "audio_config", {"num_attention_heads": 7}, "multiple of 7 heads"),
        (GEMMA4, "audio_config", {"subsampling_conv_channels": [6, 4]}, "must be a multiple of 4, not 6"),
        (GEMMA4, "audio_config", {"subsampling_conv_channels": 6}, "a field has a value of the wrong kind"),
        (GEMMA3, "vision_config", {**SIGLIP, "hidden_act": "gelu"}, "hidden_act must be gelu_pytorch_tanh"),
        (GEMMA3, "vision_config", {**SIGLIP, "num_attention_heads": 7}, "multiple of 7 heads"),
        (GEMMA3, "vision_config", {**SIGLIP, "image_size": 900}, "mm_tokens_per_image 256 must be"),
        (GEMMA3, "vision_config", {**SIGLIP, "image_size": 896 + 14}, "mm_tokens_per_image 256 must be"),
    ],
)
def test_encoders_that_are_not_supported(
    tmp_path: Path, base: dict[str, Any], part: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        read(tmp_path, base, **{part: changes})
