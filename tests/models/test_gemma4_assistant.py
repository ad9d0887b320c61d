"""Loading of Gemma 4's assistants, and which models they fit. tests/engine/test_assistant.py tests their drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError, ModelError
from paceline.core.kv_layout import make_layout
from paceline.core.speculative import SpeculativeConfig, parse_speculative_config
from paceline.engine.loading import load
from paceline.kernels import select_kernels
from paceline.models.config import read_assistant, read_facts
from paceline.models.draft import check_speculative
from paceline.models.loader import load_assistant
from paceline.models.model_config import Assistant
from tests.tiny_checkpoints import write_gemma4_assistant, write_tiny

CPU = torch.device("cpu")


def speculative(folder: Path) -> SpeculativeConfig:
    config = parse_speculative_config(json.dumps({"model": str(folder)}))
    assert config is not None
    return config


def change_config(folder: Path, text: dict[str, Any], **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["text_config"].update(text)
    file.write_text(json.dumps({**config, **changes}))


def test_an_assistant_changes_no_layout(tmp_path: Path) -> None:
    write_tiny(tmp_path / "target", "gemma4")
    write_gemma4_assistant(tmp_path / "assistant", max_position_embeddings=512)
    loaded, plain = (
        load(tmp_path / "target", torch.float32, CPU, select_kernels(CPU), own, tmp_path / "packed")
        for own in (speculative(tmp_path / "assistant"), None)
    )
    assert loaded.layout == plain.layout
    assert (loaded.max_position, plain.max_position, loaded.max_drafts) == (512, 4096, 4)
    assert len(list((tmp_path / "packed").glob("assistant-*.shards"))) == 1
    assert loaded.layout.groups == make_layout(loaded.model.group_shapes, 4, "").groups


@pytest.mark.parametrize("unified", [False, True])
def test_sizes_are_read(tmp_path: Path, unified: bool) -> None:
    write_gemma4_assistant(tmp_path, unified=unified, centroids=True, vocab_size=104)
    config = read_assistant(tmp_path)
    assert config.assistant == Assistant(40, 13, 4)
    assert config.layer_types == ("sliding", "sliding", "full")
    assert config.logit_softcap == 0.0


def test_an_assistant_alone_is_no_model(tmp_path: Path) -> None:
    write_gemma4_assistant(tmp_path)
    for implementation in ("auto", "native", "transformers"):
        with pytest.raises(ModelError, match="only drafts for a Gemma 4; give it as model in --speculative-config"):
            read_facts(tmp_path, implementation)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "target", "drafter", "complaint"),
    [
        ("llama", {"vocab_size": 103}, {}, "the model is not a native Gemma 4"),
        (
            "gemma4",
            {},
            {"target_size": 48},
            "hidden states of 48 elements, and the model's have 40; choose the assistant",
        ),
        ("gemma4", {}, {"vocab_size": 104}, "vocabulary of the draft model has 104 tokens and the model's 103"),
        ("gemma4", {}, {"head_dim": 24}, "other sliding layers"),
        ("gemma4", {}, {"sliding_window": 20}, "other sliding layers"),
        ("gemma4", {}, {"num_attention_heads": 3, "num_key_value_heads": 1}, "3 heads, which cannot share 2 KV heads"),
    ],
)
def test_an_assistant_fits_one_size(
    tmp_path: Path, family: str, target: dict[str, Any], drafter: dict[str, Any], complaint: str
) -> None:
    write_tiny(tmp_path / "target", family, **target)
    write_gemma4_assistant(tmp_path / "assistant", **drafter)
    with pytest.raises(ConfigError, match=complaint):
        check_speculative(speculative(tmp_path / "assistant"), tmp_path / "target")


def test_an_assistant_needs_native_code_of_its_target(tmp_path: Path) -> None:
    write_tiny(tmp_path / "target", "gemma4")
    write_gemma4_assistant(tmp_path / "assistant")
    check_speculative(speculative(tmp_path / "assistant"), tmp_path / "target")
    with pytest.raises(ConfigError, match="not a native Gemma 4"):
        check_speculative(speculative(tmp_path / "assistant"), tmp_path / "target", "transformers")


@pytest.mark.parametrize(
    ("text", "changes", "complaint"),
    [
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 104}, {}, "inputs for each layer"),
        ({"sliding_window": 1}, {}, "sliding_window must be at least 2"),
        ({}, {"tie_word_embeddings": False}, "a head of its own"),
        ({}, {"num_centroids": 10}, r"vocab_size \(104\) must be a multiple of num_centroids \(10\)"),
        ({}, {"centroid_intermediate_top_k": 14}, r"centroid_intermediate_top_k \(14\) must be at most"),
        ({}, {"backbone_hidden_size": 0}, "backbone_hidden_size must be a positive whole number"),
        ({}, {"text_config": None}, "text_config is missing"),
    ],
)
def test_other_configs_are_refused(
    tmp_path: Path, text: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    write_gemma4_assistant(tmp_path, centroids=True, vocab_size=104)
    change_config(tmp_path, text, **changes)
    with pytest.raises(ModelError, match=complaint):
        read_assistant(tmp_path)


def test_each_token_has_one_centroid(tmp_path: Path) -> None:
    write_gemma4_assistant(tmp_path, centroids=True, vocab_size=104)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["masked_embedding.token_ordering"][0] = 200
    save_file(tensors, file)
    with pytest.raises(ModelError, match="must have each of 104 tokens once"):
        load_assistant(tmp_path, torch.float32, select_kernels(CPU), CPU)
    del tensors["masked_embedding.token_ordering"], tensors["pre_projection.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"missing tensors: pre_projection\.weight, masked_embedding\.token_ordering"):
        load_assistant(tmp_path, torch.float32, select_kernels(CPU), CPU)
