"""Tokenizers of GGUF files with SentencePiece's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from paceline.models.gguf.convert import convert_gguf
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.models.gguf_files import write_gguf

VALUE = gguf.GGUFValueType
SPECIAL, WORDS = ["<unk>", "<s>", "</s>"], ["▁", "a", "b", "▁a", "▁b"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = [*SPECIAL, *BYTES, *WORDS]
UNKNOWN, NORMAL, CONTROL, BYTE = 2, 1, 3, 6


def convert(tmp_path: Path, save_llama: Any, space_prefix: bool | None) -> Tokenizer:
    """Convert a file with a vocabulary of SentencePiece. With None, it does not say whether a text gets a prefix."""
    metadata: dict[str, Any] = {
        "model": ("llama", VALUE.STRING),
        "pre": ("default", VALUE.STRING),
        "merges": None,
        "eot_token_id": None,
        "add_bos_token": (True, VALUE.BOOL),
        "bos_token_id": (1, VALUE.UINT32),
        "eos_token_id": (2, VALUE.UINT32),
        "unknown_token_id": (0, VALUE.UINT32),
        "tokens": (TOKENS, VALUE.ARRAY, VALUE.STRING),
        "scores": ([0.0] * (len(TOKENS) - 2) + [-1.0, -2.0], VALUE.ARRAY, VALUE.FLOAT32),
        "token_type": (
            [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS)],
            VALUE.ARRAY,
            VALUE.INT32,
        ),
    }
    if space_prefix is not None:
        metadata["add_space_prefix"] = (space_prefix, VALUE.BOOL)
    own = {f"tokenizer__ggml__{name}": value for name, value in metadata.items()}
    source = write_gguf(tmp_path / "tiny.gguf", save_llama(vocab_size=len(TOKENS), num_hidden_layers=1), **own)
    (tmp_path / "out").mkdir()
    convert_gguf(source, tmp_path / "out")
    return Tokenizer(tmp_path / "out")


@pytest.mark.parametrize(
    ("space_prefix", "tokens"),
    [
        (None, {"a b": ["▁a", "▁b"], "é": ["▁", "<0xC3>", "<0xA9>"]}),
        (True, {"a b": ["▁a", "▁b"], "é": ["▁", "<0xC3>", "<0xA9>"]}),
        (False, {"a b": ["a", "▁b"], " a": ["▁a"], "é": ["<0xC3>", "<0xA9>"]}),
    ],
)
def test_a_text_begins_with_a_space_if_the_file_says_so(
    tmp_path: Path, save_llama: Any, space_prefix: bool | None, tokens: dict[str, list[str]]
) -> None:
    tokenizer = convert(tmp_path, save_llama, space_prefix)
    for text, expected in tokens.items():
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert [TOKENS[token] for token in ids] == ["<s>", *expected]
        assert tokenizer.decode(ids[1:]) == text
