"""Tokenizers without tokenizer.json are converted once, into Paceline's own cache."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece_model

from paceline.core.errors import ModelError
from paceline.models.sources.assets import resolve_model
from paceline.models.tokenizer_files import tokenizer_files
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.tiny_checkpoints import write_tiny

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
WORDS = ["▁", "l", "o", "w", "▁l", "▁lo", "▁low"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without a tokenizer."""
    write_tiny(tmp_path / "model", "llama", vocab_size=300)
    return tmp_path / "model"


def write_byte_pairs(folder: Path) -> None:
    texts = ["<|end|>", *(chr(code) for code in range(33, 127)), "Ġ", "lo", "low"]
    (folder / "vocab.json").write_text(json.dumps({text: index for index, text in enumerate(texts)}))
    (folder / "merges.txt").write_text("#version: 0.2\nl o\nlo w\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "unk_token": None, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_sentencepiece(folder: Path) -> None:
    model = sentencepiece_model.ModelProto()
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces += [(word, -float(rank), NORMAL) for rank, word in enumerate(WORDS)]
    for text, score, kind in pieces:
        model.pieces.add(piece=text, score=score, type=kind)
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id = 0, 1, 2
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_tokenizer_is_converted_once_and_the_model_is_linked(tmp_path: Path, folder: Path) -> None:
    write_byte_pairs(folder)
    said: list[str] = []
    made = resolve_model(str(folder), tmp_path / "cache", said.append)
    assert said[0] == f"converting the tokenizer of {folder}"
    assert made.parent.parent == tmp_path / "cache"
    assert made.name == "model"
    assert (made / "model.safetensors").resolve() == folder / "model.safetensors"
    assert not (folder / "tokenizer.json").exists()
    tokenizer = Tokenizer(made)
    ids = tokenizer.encode("low low", add_special_tokens=False)
    assert [tokenizer.token_string(token_id) for token_id in ids] == ["low", "Ġ", "low"]
    assert tokenizer.eos_token_ids == {0, 2}
    said.clear()
    assert resolve_model(str(folder), tmp_path / "cache", said.append) == made
    assert said == []


def test_a_sentencepiece_model_keeps_its_tokens(tmp_path: Path, folder: Path) -> None:
    write_sentencepiece(folder)
    tokenizer = Tokenizer(resolve_model(str(folder), tmp_path / "cache", print))
    ids = tokenizer.encode("low lo", add_special_tokens=False)
    assert [tokenizer.token_string(token_id) for token_id in ids] == ["▁low", "▁lo"]
    (folder / "tokenizer_config.json").unlink()  # without it, transformers takes a class that adds no prefix
    with pytest.raises(ModelError, match=r"has other tokens than tokenizer\.model"):
        resolve_model(str(folder), tmp_path / "cache", print)


@pytest.mark.parametrize("package", ["sentencepiece", "tiktoken", "mistral_common"])
def test_a_missing_package_is_named(
    tmp_path: Path, folder: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package == "sentencepiece":
        write_sentencepiece(folder)
    elif package == "tiktoken":
        (folder / "tokenizer.model").write_bytes(base64.b64encode(b"a") + b" 0\n")
    else:
        (folder / "tekken.json").write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=rf"needs {package}; run: pip install {package.replace('_', '-')}$"):
        resolve_model(str(folder), tmp_path / "cache", print)


def test_a_split_that_no_file_holds_is_refused(tmp_path: Path, folder: Path) -> None:
    (folder / "tiktoken.model").write_bytes(base64.b64encode(b"a") + b" 0\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "other"}))
    with pytest.raises(ModelError, match="does not say how the tokenizer splits text"):
        resolve_model(str(folder), tmp_path / "cache", print)


def test_files_of_a_tokenizer() -> None:
    assert tokenizer_files(["tokenizer.json", "tokenizer.model", "config.json"]) == ["tokenizer.json"]
    assert tokenizer_files(["vocab.json", "added_tokens.json", "config.json"]) == []
    assert tokenizer_files(["vocab.json", "merges.txt", "added_tokens.json", "config.json"]) == [
        "added_tokens.json",
        "merges.txt",
        "vocab.json",
    ]
