"""The layout of a model's KV is known from its config, before its weights are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.speculative import parse_speculative_config
from paceline.engine.loading import load, native_layout
from paceline.kernels.reference import ReferenceKernels
from tests.tiny_checkpoints import write_tiny

CPU, FP32 = torch.device("cpu"), torch.float32


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4", "granite_hybrid", "deepseek_v3", "qwen3_5"])
@pytest.mark.parametrize("drafts", [False, True])
def test_it_is_that_of_the_loaded_model(tmp_path: Path, family: str, drafts: bool) -> None:
    write_tiny(tmp_path / "model", family, vocab_size=101)
    speculative = None
    if drafts:
        write_tiny(tmp_path / "draft", "llama", vocab_size=101, max_position_embeddings=2048)
        speculative = parse_speculative_config(f'{{"model": "{tmp_path / "draft"}", "num_speculative_tokens": 3}}')
    loaded = load(tmp_path / "model", FP32, CPU, ReferenceKernels(), speculative)
    told = native_layout(tmp_path / "model", FP32, speculative, "none", "auto")
    assert told == (loaded.layout, loaded.max_position)


def test_only_loading_tells_that_of_a_model_in_the_code_of_transformers(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    assert native_layout(tmp_path, FP32, None, "none", "transformers") is None
