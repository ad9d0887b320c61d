"""Models that retrieve pages: how tokens attend and how queries are written comes from the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import ModelError
from paceline.core.pooling_config import DenseModule, NormalizeModule
from paceline.core.pooling_folder import read_pooling_config
from paceline.models.config import read_config, read_encoders
from paceline.models.pooling.causal import load_pooler
from tests.retriever_folders import DIM, ColQwen


def test_the_checkpoint_says_how_queries_and_pages_are_written(tmp_path: Path) -> None:
    ColQwen(
        tmp_path, query_prefix="Query: ", query_augmentation_token="<end>", visual_prompt_prefix="<image>Describe it."
    )
    config = read_pooling_config(tmp_path)
    assert config is not None
    assert (config.tasks, config.dim, config.attention, config.similarity) == ({"token_embed"}, DIM, "causal", "maxsim")
    assert (config.prompts, config.query_suffix) == ({"query": "Query: "}, 10 * "<end>")
    assert config.image_prompt == "<image>Describe it."
    dense, normalize = config.token_modules
    assert isinstance(dense, DenseModule)
    assert (dense.folder, dense.name, dense.bias) == ("", "custom_text_proj", None)
    assert isinstance(normalize, NormalizeModule)
    encoders = read_encoders(tmp_path)
    assert encoders is not None
    assert encoders.vision is not None


def test_a_checkpoint_that_says_nothing_of_queries_leaves_them_as_they_are(tmp_path: Path) -> None:
    ColQwen(tmp_path, "bidirectional")
    config = read_pooling_config(tmp_path)
    assert config is not None
    assert (config.prompts, config.query_suffix, config.image_prompt, config.attention) == ({}, "", "", "full")
    assert read_config(tmp_path).bidirectional


@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        (None, None, "lacks retrieval_attention_contract, which says whether tokens see later ones"),
        ("both", None, "must be causal or bidirectional, not both"),
        ("causal", "bidirectional", "must be causal or bidirectional, not causal and bidirectional"),
    ],
)
def test_a_model_that_does_not_say_how_its_tokens_attend_is_refused(
    outer: str | None, inner: str | None, message: str, tmp_path: Path
) -> None:
    ColQwen(tmp_path, outer)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["retrieval_attention_contract"] = inner
    path.write_text(json.dumps(config))
    for read in (read_pooling_config, read_config):
        with pytest.raises(ModelError, match=message):
            read(tmp_path)


def test_a_layer_of_another_size_is_refused(tmp_path: Path) -> None:
    ColQwen(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dim": 128}))
    with pytest.raises(ModelError, match=rf"custom_text_proj.weight is \[{DIM}, 48\] instead of \[128, 48\]"):
        load_pooler(tmp_path, bidirectional=False)
