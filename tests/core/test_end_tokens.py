"""The end tokens of a model's folder, as a worker reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.end_tokens import read_end_token_ids
from paceline.core.errors import ModelError

ADDED = [{"id": 7, "content": "<end>"}, {"id": 8, "content": "<eos>", "special": True}]


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def tokenizer(added: Any = ADDED) -> str:
    return json.dumps({"version": "1.0", "added_tokens": added, "model": {"vocab": {"added_tokens": 1}}}, indent=2)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 3}}, {3}),
        ({"config": {"text_config": {"eos_token_id": [3, 4]}}}, {3, 4}),
        ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [5]}}, {5}),
        # A chat model's own end of a turn is the tokenizer's.
        ({"config": {"eos_token_id": 3}, "tokenizer_config": {"eos_token": "<end>"}}, {3, 7}),
        ({"tokenizer_config": {"eos_token": {"content": "<eos>"}}}, {8}),
        ({"special_tokens_map": {"eos_token": "<eos>"}, "tokenizer_config": {"eos_token": "<end>"}}, {7}),
        ({"config": {"eos_token_id": [-1, 3, 99], "vocab_size": 10}}, {3}),
        ({"tokenizer_config": {"eos_token": "unknown"}}, set()),
    ],
)
def test_ends_come_from_all_files(tmp_path: Path, files: dict[str, Any], expected: set[int]) -> None:
    write(tmp_path, **files)
    assert read_end_token_ids(tmp_path, tokenizer()) == expected


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write(tmp_path, config={"eos_token_id": "x"})
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id"):
        read_end_token_ids(tmp_path, tokenizer())
    with pytest.raises(ModelError, match="added tokens cannot be read"):
        read_end_token_ids(tmp_path, tokenizer([3]))
