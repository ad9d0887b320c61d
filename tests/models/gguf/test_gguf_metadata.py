"""GGUF files whose metadata are missing or impossible are refused with the key, its value and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from paceline.core.errors import ModelError
from paceline.models.gguf.convert import convert_gguf
from tests.models.gemma4_gguf import SIZES, write_gemma4_gguf
from tests.models.gguf_files import write_gguf
from tests.tiny_checkpoints import write_tiny

VALUE = gguf.GGUFValueType
TOKENS = 261
HEADS = 6
SIZE = "a whole number of at least 1"
TOKEN_ID = f"a whole number from 0 to {TOKENS - 1}"
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": ("llama", VALUE.STRING),
    "tokenizer.ggml.pre": None,
    "tokenizer.ggml.merges": None,
}


def refusal(source: Path, target: Path) -> str:
    """Return why a damaged file is refused. Check that the rest of the text names the file and says what to do."""
    with pytest.raises(ModelError) as caught:
        convert_gguf(source, target)
    before, after = "is damaged or not a GGUF file: ", "; download it again, or convert the model again with "
    text = str(caught.value).removeprefix(f"{source.name} {before}").removesuffix("llama.cpp's convert_hf_to_gguf.py")
    assert text.endswith(after)
    return text.removesuffix(after)


def write(tmp_path: Path, save_llama: Any, metadata: dict[str, Any]) -> Path:
    reference = save_llama(vocab_size=TOKENS, num_attention_heads=HEADS)
    own = {name.replace(".", "__"): value for name, value in metadata.items()}
    return write_gguf(tmp_path / "tiny.gguf", reference, **own)


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("llama.block_count", SIZE),
        ("llama.context_length", SIZE),
        ("llama.embedding_length", SIZE),
        ("llama.feed_forward_length", SIZE),
        ("llama.attention.head_count", SIZE),
        ("llama.attention.head_count_kv", f"a whole number from 1 to {HEADS}"),
        ("llama.attention.layer_norm_rms_epsilon", "a finite number of at least 0"),
        ("tokenizer.ggml.tokens", "a list of STRING values"),
        ("tokenizer.ggml.merges", "a list of STRING values"),
    ],
)
def test_a_missing_key_is_named(tmp_path: Path, save_llama: Any, key: str, wanted: str) -> None:
    source = write(tmp_path, save_llama, {key: None})
    assert refusal(source, tmp_path / "out") == f"it has no {key}, which must be {wanted}"


def test_scores_of_sentencepiece_are_needed(tmp_path: Path, save_llama: Any) -> None:
    source = write(tmp_path, save_llama, SENTENCEPIECE)
    wanted = f"it has no tokenizer.ggml.scores, which must be a list of {TOKENS} FLOAT32 values"
    assert refusal(source, tmp_path / "out") == wanted


@pytest.mark.parametrize(
    ("key", "value", "kind", "wanted"),
    [
        ("llama.block_count", "4", VALUE.STRING, SIZE),
        ("llama.attention.head_count", 0, VALUE.UINT32, SIZE),
        ("llama.attention.head_count", True, VALUE.BOOL, SIZE),
        ("llama.attention.head_count_kv", 0, VALUE.UINT32, f"a whole number from 1 to {HEADS}"),
        ("llama.attention.head_count_kv", 12, VALUE.UINT32, f"a whole number from 1 to {HEADS}"),
        ("llama.rope.dimension_count", 0, VALUE.UINT32, SIZE),
        ("llama.vocab_size", -1, VALUE.INT32, SIZE),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), VALUE.FLOAT32, "a finite number of at least 0"),
        ("llama.rope.freq_base", 0.0, VALUE.FLOAT32, "a finite number of at least 1"),
        ("llama.rope.freq_base", float("nan"), VALUE.FLOAT32, "a finite number of at least 1"),
        ("llama.rope.freq_base", float("inf"), VALUE.FLOAT32, "a finite number of at least 1"),
        ("tokenizer.ggml.tokens", "abc", VALUE.STRING, "a list of STRING values"),
        ("tokenizer.ggml.bos_token_id", TOKENS, VALUE.UINT32, TOKEN_ID),
        ("tokenizer.ggml.eos_token_id", 999, VALUE.UINT32, TOKEN_ID),
        ("tokenizer.ggml.eos_token_id", -1, VALUE.INT32, TOKEN_ID),
        ("tokenizer.ggml.padding_token_id", 2**32 - 1, VALUE.UINT32, TOKEN_ID),
        ("tokenizer.ggml.add_bos_token", "no", VALUE.STRING, "true or false"),
    ],
)
def test_an_impossible_value_is_named(
    tmp_path: Path, save_llama: Any, key: str, value: object, kind: gguf.GGUFValueType, wanted: str
) -> None:
    source = write(tmp_path, save_llama, {key: (value, kind)})
    assert refusal(source, tmp_path / "out") == f"its {key} is {value!r}, but must be {wanted}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer.ggml.model": ("bert", VALUE.STRING)},
            "its tokenizer.ggml.model is 'bert', and only gpt2",
        ),
        (
            {"tokenizer.ggml.model": None},
            "its tokenizer.ggml.model is 'None', and only gpt2, llama, gemma4",
        ),
        (
            {"llama.attention.head_count_kv": ([2, 3], VALUE.ARRAY, VALUE.UINT32)},
            "its llama.attention.head_count_kv differs from layer to layer, which would be lost",
        ),
    ],
)
def test_what_is_not_converted_is_no_damage(
    tmp_path: Path, save_llama: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=rf"^tiny\.gguf cannot be converted: {message}"):
        convert_gguf(write(tmp_path, save_llama, changes), tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "entries", "kind", "said", "wanted"),
    [
        ("tokens", [1, 2], VALUE.INT32, "a list of 2 INT32 values", "a list of STRING values"),
        ("token_type", [3], VALUE.INT32, "a list of 1 INT32 values", f"a list of {TOKENS} INT32 values"),
        ("scores", [0.5] * 7, VALUE.FLOAT32, "a list of 7 FLOAT32 values", f"a list of {TOKENS} FLOAT32 values"),
    ],
)
def test_lists_of_a_tokenizer_are_complete(
    tmp_path: Path, save_llama: Any, key: str, entries: Any, kind: gguf.GGUFValueType, said: str, wanted: str
) -> None:
    source = write(tmp_path, save_llama, {f"tokenizer.ggml.{key}": (entries, VALUE.ARRAY, kind)})
    assert refusal(source, tmp_path / "out") == f"its tokenizer.ggml.{key} is {said}, but must be {wanted}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.attention.head_count_kv": 4}, "its llama.attention.head_count 6 is not a multiple of head_count_kv 4"),
        ({"llama.embedding_length": 50}, "its llama.embedding_length 50 is not a multiple of attention.head_count 6"),
    ],
)
def test_sizes_that_do_not_divide_are_named(
    tmp_path: Path, save_llama: Any, changes: dict[str, int], message: str
) -> None:
    source = write(tmp_path, save_llama, {key: (value, VALUE.UINT32) for key, value in changes.items()})
    assert refusal(source, tmp_path / "out") == message


def test_each_token_needs_a_row_of_the_embedding(tmp_path: Path, save_llama: Any) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", save_llama(vocab_size=TOKENS - 1))
    wanted = f"its tokenizer has {TOKENS} tokens, but its token_embd.weight only {TOKENS - 1} rows"
    assert refusal(source, tmp_path / "out") == wanted


def test_values_of_gemma_4_have_the_same_bounds(tmp_path: Path) -> None:
    reference = write_tiny(tmp_path, "gemma4_dense", **SIZES)
    source = write_gemma4_gguf(tmp_path / "source" / "tiny.gguf", reference, rope__freq_base=(0.0, VALUE.FLOAT32))
    wanted = "its gemma4.rope.freq_base is 0.0, but must be a finite number of at least 1"
    assert refusal(source, tmp_path / "out") == wanted
