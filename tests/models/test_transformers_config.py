"""config.json of any family: the few fields that are read before `transformers` reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelError
from paceline.models.config import implementation, read_facts
from paceline.models.config.transformers import TransformersConfig


def write(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"], **fields}))
    return folder


@pytest.mark.parametrize(
    ("fields", "vocab_size", "max_position", "dtype"),
    [
        ({}, 0, 0, "float32"),
        ({"vocab_size": 7, "max_position_embeddings": 9, "torch_dtype": "bfloat16"}, 7, 9, "bfloat16"),
        ({"dtype": "float32", "text_config": {"vocab_size": 8, "dtype": "bfloat16"}}, 8, 0, "bfloat16"),
    ],
)
def test_fields_are_read_where_families_have_them(
    tmp_path: Path, fields: dict[str, Any], vocab_size: int, max_position: int, dtype: str
) -> None:
    facts = read_facts(write(tmp_path, **fields), "auto")
    assert facts == TransformersConfig("OtherForCausalLM", vocab_size, max_position, dtype)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"quantization_config": {"bits": 4}}, "quantized checkpoints need a native architecture"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn is not supported"),
    ],
)
def test_weights_that_nothing_here_computes_with_are_refused(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        read_facts(write(tmp_path, **fields), "transformers")


@pytest.mark.parametrize(
    ("architecture", "asked", "code"),
    [
        ("LlamaForCausalLM", "auto", "native"),
        ("LlamaForCausalLM", "transformers", "transformers"),
        ("OtherForCausalLM", "auto", "transformers"),
        ("OtherForCausalLM", "native", "native"),
    ],
)
def test_the_code_is_native_if_there_is_some(tmp_path: Path, architecture: str, asked: Any, code: str) -> None:
    assert implementation(write(tmp_path, architectures=[architecture]), asked) == code
