"""GGUF files of Gemma 4 compute what the same model's safetensors compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from paceline.core.errors import ModelError
from paceline.kernels import select_kernels
from paceline.models.base import Model
from paceline.models.config import read_config
from paceline.models.gguf.convert import convert_gguf
from paceline.models.loader import load_model
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.models.gemma4_gguf import KIND_SIZES, SIZES, TOKENS, write_gemma4_gguf
from tests.models.packing.test_quantized_models import assert_same
from tests.tiny_checkpoints import write_tiny

CPU = torch.device("cpu")
PROMPT = [(7 * place) % len(TOKENS) for place in range(40)]


def write(folder: Path, family: str, **changes: object) -> transformers.PreTrainedModel:
    """Write a tiny checkpoint in bf16, as released ones are."""
    return write_tiny(folder, family, torch.bfloat16, **SIZES, **KIND_SIZES[family], **changes)


def logits(folder: Path, paged_contexts: Any, quantization: Any = "none") -> torch.Tensor:
    kernels = select_kernels(CPU)
    model: Model = load_model(folder, torch.float32, kernels, CPU, quantization=quantization)
    found: torch.Tensor = paged_contexts(model, 1, 64, torch.float32).step({0: PROMPT})[0]
    return found


@pytest.mark.parametrize(
    ("family", "changes", "halves"),
    [
        ("gemma4", {}, False),
        ("gemma4_dense", {"tie_word_embeddings": False, "final_logit_softcapping": 5.0}, False),
        ("gemma4_experts", {"sliding_window": 6, "num_experts": 5}, False),
        ("gemma4_experts", {}, True),
    ],
)
def test_a_gguf_file_is_the_same_model(
    tmp_path: Path, paged_contexts: Any, family: str, changes: dict[str, Any], halves: bool
) -> None:
    reference = write(tmp_path, family, **changes)
    target = tmp_path / "converted"
    convert_gguf(write_gemma4_gguf(tmp_path / "source" / "tiny.gguf", reference, halves=halves), target)
    assert read_config(target) == read_config(tmp_path)
    assert torch.equal(logits(target, paged_contexts), logits(tmp_path, paged_contexts))


@pytest.mark.parametrize(("family", "halves"), [("gemma4", False), ("gemma4_experts", True)])
def test_its_blocks_compute_the_same(tmp_path: Path, paged_contexts: Any, family: str, halves: bool) -> None:
    reference = write(tmp_path, family)
    source = write_gemma4_gguf(tmp_path / "source" / "tiny.gguf", reference, gguf.GGMLQuantizationType.Q8_0, halves)
    convert_gguf(source, tmp_path / "converted")
    whole, blocks = (logits(tmp_path / "converted", paged_contexts, how) for how in ("none", "gguf"))
    assert_same(whole, blocks, torch.float32)
    original = logits(tmp_path, paged_contexts)
    # Random weights, experts above all, make much of small differences.
    assert 0 < (whole - original).norm() / original.norm() < 0.4


def test_the_tokenizer_and_the_ends_of_answers(tmp_path: Path) -> None:
    convert_gguf(
        write_gemma4_gguf(tmp_path / "source" / "tiny.gguf", write(tmp_path, "gemma4_dense")), tmp_path / "converted"
    )
    tokenizer = Tokenizer(tmp_path / "converted")
    ids = tokenizer.encode("he he<turn|>é", False)
    assert [TOKENS[token] for token in ids] == ["he", "▁he", "<turn|>", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("he", True) == [TOKENS.index("<bos>"), TOKENS.index("he")]
    assert set(tokenizer.eos_token_ids) == {TOKENS.index(own) for own in ("<eos>", "<turn|>", "<|tool_response>")}
    assert tokenizer.chat_template_source


UINT32 = gguf.GGUFValueType.UINT32


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope__dimension_count_swa": (8, UINT32)}, "rotate only a part of each head"),
        ({"attention__value_length": (16, UINT32)}, "key_length and attention.value_length differ"),
        ({"rope__scaling__type": ("linear", gguf.GGUFValueType.STRING)}, "rope scaling would be lost"),
        ({"block_count": (7, UINT32)}, "does not name 7 layers"),
    ],
)
def test_what_would_be_lost_is_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    source = write_gemma4_gguf(tmp_path / "source" / "tiny.gguf", write(tmp_path, "gemma4_dense"), **metadata)
    with pytest.raises(ModelError, match=rf"^tiny\.gguf cannot be converted: .*{message}.*Hugging Face folder$"):
        convert_gguf(source, tmp_path / "converted")


def test_tensors_of_other_models_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = write(tmp_path, "gemma4_dense")
    monkeypatch.setattr("tests.models.gemma4_gguf._tensors", lambda *_: {"v.patch_embd.weight": torch.ones(2, 2)})
    source = write_gemma4_gguf(tmp_path / "source" / "tiny.gguf", reference)
    with pytest.raises(ModelError, match=r"has the tensor v\.patch_embd\.weight, which no Gemma 4 for text has"):
        convert_gguf(source, tmp_path / "converted")
