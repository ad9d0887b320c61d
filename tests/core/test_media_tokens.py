from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from paceline.core.errors import ModelError
from paceline.core.media import MediaKind
from paceline.core.media_tokens import MediaTokens, read_media_tokens

IMAGE, FRAME, AUDIO = MediaKind.IMAGE, MediaKind.VIDEO_FRAME, MediaKind.AUDIO


def read(folder: Path, **config: Any) -> dict[MediaKind, MediaTokens]:
    (folder / "config.json").write_text(json.dumps(config))
    return dict(read_media_tokens(folder))


@pytest.mark.parametrize("name", ["Gemma4", "Gemma4Unified"])
def test_gemma4(tmp_path: Path, name: str) -> None:
    architectures = [f"{name}ForConditionalGeneration"]
    expected = {
        IMAGE: MediaTokens(258_880, 255_999, 258_882),
        FRAME: MediaTokens(258_884, 255_999, 258_882),
        AUDIO: MediaTokens(258_881, 256_000, 258_883),
    }
    assert read(tmp_path, architectures=architectures, vision_config={}, audio_config={}) == expected
    config = getattr(transformers, f"{name}Config")(vision_config={}, audio_config={}).to_dict()
    assert read(tmp_path, **{**config, "architectures": architectures}) == expected
    without = read(tmp_path, **{**config, "architectures": architectures, "audio_config": None})
    assert without == {IMAGE: expected[IMAGE], FRAME: expected[FRAME]}
    ids = {"image_token_id": 1, "video_token_id": 2, "boi_token_id": 3, "eoi_token_id": 4}
    ids |= {"audio_token_id": 5, "boa_token_id": 6, "eoa_token_index": 7}
    assert read(tmp_path, **{**config, "architectures": architectures, **ids}) == {
        IMAGE: MediaTokens(1, 3, 4),
        FRAME: MediaTokens(2, 3, 4),
        AUDIO: MediaTokens(5, 6, 7),
    }


def test_gemma3(tmp_path: Path) -> None:
    architectures = ["Gemma3ForConditionalGeneration"]
    config = {**transformers.Gemma3Config().to_dict(), "architectures": architectures}
    assert read(tmp_path, **config) == {IMAGE: MediaTokens(262_144, 255_999, 256_000)}
    ids = {"image_token_index": 1, "boi_token_index": 2, "eoi_token_index": 3}
    assert read(tmp_path, architectures=architectures, vision_config={}, **ids) == {IMAGE: MediaTokens(1, 2, 3)}


def test_models_of_text_have_none(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=["Gemma4ForCausalLM"], vision_config={}) == {}
    assert read(tmp_path) == {}


def test_configs_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        read_media_tokens(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        read_media_tokens(tmp_path)
    architectures = ["Gemma3ForConditionalGeneration"]
    with pytest.raises(ModelError, match="boi_token_id must be the id of a token, not 'x'"):
        read(tmp_path, architectures=architectures, vision_config={}, boi_token_index="x")
