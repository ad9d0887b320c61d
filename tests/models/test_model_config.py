from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from paceline.core.errors import ModelError
from paceline.models.config import read_config
from paceline.models.registry import MODELS
from tests.models.configs import (
    LLAMA,
    read,
)


@pytest.mark.parametrize(
    "family",
    ["Llama", "Gemma3Text", "Qwen2", "Qwen3", "Mistral", "Ministral3", "SmolLM3", "GptOss", "Mixtral", "Qwen3Moe"],
)
def test_what_transformers_saves_is_read_as_it_understands_it(tmp_path: Path, family: str) -> None:
    theirs = getattr(transformers, f"{family}Config")(num_hidden_layers=4)
    theirs.architectures = [f"{family.removesuffix('Text')}ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    for name, their_name in {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "norm_eps": "rms_norm_eps",
        "max_position": "max_position_embeddings",
        "tie_word_embeddings": "tie_word_embeddings",
    }.items():
        assert getattr(ours, name) == getattr(theirs, their_name)
    heads, head_dim = ours.attention["full"], theirs.hidden_size // theirs.num_attention_heads
    assert (heads.num_kv_heads, heads.head_dim) == (
        theirs.num_key_value_heads,
        getattr(theirs, "head_dim", None) or head_dim,
    )
    window = getattr(theirs, "sliding_window", None)
    assert {ours.attention[kind].window for kind in ours.layer_types} - {0} == ({window} if window else set())


def test_an_unreadable_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*config\.json: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        read_config(tmp_path)


def test_reading_a_config_or_finding_a_model_imports_no_torch() -> None:
    code = "import sys, paceline.models.config, paceline.models.sources.assets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("architecture", MODELS)
def test_every_architecture_has_a_reader(tmp_path: Path, architecture: str) -> None:
    fields = {"architectures": [architecture], "num_local_experts": 8, "num_experts_per_tok": 2, "mamba_n_heads": 6}
    if "VL" in architecture:  # the sections of its rotary embedding are those of a head of 128
        fields["head_dim"] = 128
    if architecture in ("ColPaliForRetrieval", "ColQwen2ForRetrieval"):  # their text model's fields are inside
        fields["vlm_config"] = {"text_config": LLAMA}
    assert read(tmp_path, LLAMA, **fields).architecture == architecture


def test_the_way_out_of_a_refusal_is_named_if_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="; --model-impl transformers may compute it"):
        read(tmp_path, LLAMA, rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(ModelError, match=r"hidden_size is missing$"):
        read(tmp_path, LLAMA, hidden_size=None)
