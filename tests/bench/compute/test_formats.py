"""Figures of rounded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.compute import formats
from bench.compute.formats import Contexts, load, load_memory, perplexity, same_tokens


def test_perplexity_is_the_inverse_of_the_mean_probability() -> None:
    tokens = [0, 1, 2]
    assert perplexity(torch.zeros(3, 8), tokens) == pytest.approx(8)
    certain = torch.nn.functional.one_hot(torch.tensor([1, 2, 0]), 8) * 100.0
    assert perplexity(certain, tokens) == pytest.approx(1)


def test_same_tokens_are_counted_among_the_last_ones() -> None:
    tokens = [3, 1, 2, 5, 4]
    logits = torch.nn.functional.one_hot(torch.tensor([1, 0, 5, 0, 0]), 8).float()
    assert same_tokens(logits, tokens, 3) == 1
    assert same_tokens(logits, tokens, 4) == 2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_context_that_grows_has_the_logits_of_a_whole_one(
    tmp_path: Path, request: pytest.FixtureRequest, family: str
) -> None:
    request.getfixturevalue(f"save_{family}")(vocab_size=261)
    contexts = Contexts(load(tmp_path, "none"), 120)
    tokens = contexts.greedy(list(range(3, 60)), 50)
    whole = contexts.logits(tokens)
    assert same_tokens(whole, tokens, 50) == 50
    assert torch.equal(contexts.logits(tokens, 100), whole[100:])


def test_the_peak_of_a_load_is_that_of_another_process(tmp_path: Path, save_llama: Any) -> None:
    save_llama(vocab_size=261)
    found = load_memory(tmp_path, "int4")
    assert 0 < found["before"] <= found["final"] <= found["peak"]


def test_each_format_is_a_row(tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Letters:
        def __init__(self, folder: Path) -> None:
            pass

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(letter) for letter in text[:200]]

    save_llama(vocab_size=261)
    monkeypatch.setattr(formats, "Tokenizer", Letters)
    monkeypatch.setattr(formats, "load_memory", lambda folder, name: {"peak": 1})
    rows = formats.measure(tmp_path, ["none", "int8", "mxfp4"], 2)
    assert [row["format"] for row in rows] == ["none", "int8", "mxfp4"]
    assert rows[0]["same tokens"] == 1.0
    assert len({row["perplexity"] for row in rows}) == 3
