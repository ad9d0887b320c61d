"""The configuration of Qwen 3-VL: the text model and the encoder, in the style of any transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from paceline.core.errors import ModelError
from paceline.models.config import encoding_size, read_config, read_encoders
from paceline.models.encoder_config import EncodersConfig, Qwen3VisionConfig
from paceline.models.model_config import Rope
from paceline.models.rotary import section_axes
from tests.models.configs import QWEN3_VL, read

ROPE = Rope(5_000_000.0, sections=(24, 20, 20))
TEXT, VISION = QWEN3_VL["text_config"], QWEN3_VL["vision_config"]
MROPE = TEXT["rope_scaling"]
ENCODER = Qwen3VisionConfig(24, 1024, 4096, 16, 16, 2, 2, 48, (5, 11, 17), 10_000.0)


def with_text(**changes: object) -> dict[str, Any]:
    return {"text_config": {**TEXT, **changes}}


def with_vision(**changes: object) -> dict[str, Any]:
    return {"vision_config": {**VISION, **changes}}


def test_as_it_was_released(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_VL)
    assert config.attention["full"].rope == ROPE
    assert (config.tie_word_embeddings, config.max_position, config.dtype) == (True, 262_144, "bfloat16")
    assert (config.deepstack_layers, config.encoding_size, config.has_grids) == (3, 4 * 2048, True)
    assert not config.whole_media
    assert read_encoders(tmp_path) == EncodersConfig(2048, ENCODER, None, frames=True)
    assert encoding_size(tmp_path, "auto") == config.encoding_size


def test_as_transformers_5_writes_it(tmp_path: Path) -> None:
    theirs = transformers.Qwen3VLConfig(text_config=TEXT, vision_config=VISION, architectures=QWEN3_VL["architectures"])
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path).attention["full"].rope == ROPE
    assert read_encoders(tmp_path) == EncodersConfig(2048, ENCODER, None, frames=True)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_experts(tmp_path: Path, name: str) -> None:
    changes = {name: 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False}
    config = read(tmp_path, QWEN3_VL | with_text(**changes), architectures=["Qwen3VLMoeForConditionalGeneration"])
    assert (config.experts.count, config.experts.inner_size, config.experts.dense_layers) == (128, 768, set())
    assert config.experts.routing.normalize
    assert config.attention["full"].rope == ROPE


def test_a_model_without_an_encoder_adds_nothing(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_VL, vision_config=None)
    assert (config.deepstack_layers, config.encoding_size) == (0, 2048)
    assert read_encoders(tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (with_text(rope_scaling={**MROPE, "mrope_section": [24, 20, 21]}), "whose sum is 64"),
        (with_text(rope_scaling={**MROPE, "mrope_section": [24, 40]}), "must be three numbers"),
        (with_text(rope_scaling={**MROPE, "mrope_section": [64, 20, -20]}), "must be three numbers"),
        (with_text(rope_scaling={**MROPE, "mrope_interleaved": False}), "side by side .*--model-impl transformers"),
        (with_text(num_hidden_layers=2), "names 3 layers, and the text model has 2"),
        (with_vision(deepstack_visual_indexes=5), "wrong kind"),
    ],
)
def test_text_models_that_are_not_supported(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        read(tmp_path, QWEN3_VL | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be gelu_pytorch_tanh"),
        ({"out_hidden_size": 3584}, "out_hidden_size is 3584, and the text model's hidden_size 2048"),
        ({"num_heads": 12}, "hidden_size 1024 must be a multiple of four times 12 heads"),
        ({"num_position_embeddings": 2305}, "must be the square of a number, not 2305"),
        ({"deepstack_visual_indexes": [5, 11, 24]}, "must be different layers of 24"),
        ({"deepstack_visual_indexes": [5, 5]}, "must be different layers of 24"),
        ({"patch_size": [16, 16]}, "patch_size must be a positive whole number"),
    ],
)
def test_encoders_that_are_not_supported(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL | with_vision(**changes)))
    with pytest.raises(ModelError, match=message):
        read_encoders(tmp_path)


def test_pairs_turn_by_frame_row_and_column_in_turn() -> None:
    assert section_axes(replace(ROPE, sections=(6, 2, 2)), 10).tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 0, 0]
