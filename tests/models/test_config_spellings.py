"""Fields of config.json that people and tools write in other ways than `transformers` saves them.

`transformers` itself says what each of them means: a model that it loads from the same folder computes the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.kernels.reference import ReferenceKernels
from paceline.models.loader import load_model
from tests.tiny_checkpoints import write_tiny

CPU = torch.device("cpu")
TOKENS = 90
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MISSING = "missing"
LINEAR = {"rope_type": "linear", "factor": 4.0}
GROWING = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 1.0, "llama_4_scaling_beta": 0.3}

SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "scaling-beside-parameters": ("qwen3", {"rope_scaling": YARN}),
    "scaling-beside-parameters-gemma3": ("gemma3", {"rope_scaling": LINEAR}),
    "yarn-with-outer-original": (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}
        | {"rope_theta": 1e4, "original_max_position_embeddings": 32},
    ),
    "llama3-with-outer-original": (
        "llama",
        {"rope_parameters": None, "rope_scaling": LLAMA3} | {"rope_theta": 1e4, "original_max_position_embeddings": 64},
    ),
    "ministral3-without-rope": ("ministral3", {"rope_parameters": None}),
    "ministral3-without-original": ("ministral3", {"rope_parameters": GROWING}),
    "gemma3-with-bounded-scores": ("gemma3", {"attn_logit_softcapping": 1.5}),
    "gemma3-with-outer-thetas": (
        "gemma3",
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}}
        | {"rope_theta": 3e5, "rope_local_base_freq": 777.0},
    ),
    "deepseek-order-null": ("deepseek_v3", {"rope_interleave": None}),
    "qwen3_5-without-dense-size": ("qwen3_5_moe", {"intermediate_size": None}),
    "granite-without-dense-size": ("granite_hybrid", {"intermediate_size": MISSING}),
}


def check_against_the_folder(folder: Path, architecture: type, paged_contexts: Any) -> None:
    """Compare our logits of one prompt with those of the model that `transformers` loads from a folder."""
    reference: Any = architecture.from_pretrained(folder, dtype=torch.float32)  # type: ignore[attr-defined]
    model = load_model(folder, torch.float32, ReferenceKernels(), CPU)
    tokens = torch.randint(3, 100, (TOKENS,), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = reference.eval()(tokens[None], use_cache=False).logits[0]
    actual = paged_contexts(model, 1, TOKENS).step({0: tokens.tolist()})[0]
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("family", "fields"), SPELLINGS.values(), ids=SPELLINGS)
def test_a_field_means_what_it_means_to_transformers(
    tmp_path: Path, paged_contexts: Any, family: str, fields: dict[str, Any]
) -> None:
    saved = write_tiny(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value != MISSING}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_against_the_folder(tmp_path, type(saved), paged_contexts)


def test_gemma4_may_rotate_nothing(tmp_path: Path, paged_contexts: Any) -> None:
    saved = write_tiny(tmp_path, "gemma4_dense", global_head_dim=4)  # A quarter of two pairs is none.
    check_against_the_folder(tmp_path, type(saved), paged_contexts)


@pytest.mark.parametrize("family", ["llama", "gemma4", "granite_hybrid"])
def test_two_different_matrices_are_not_tied(tmp_path: Path, paged_contexts: Any, family: str) -> None:
    saved = write_tiny(tmp_path, family, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    check_against_the_folder(tmp_path, type(saved), paged_contexts)
