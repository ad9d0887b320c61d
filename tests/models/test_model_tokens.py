"""The greedy tokens of a request in a mixed batch are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets
from paceline.models.loader import load_model
from tests.tiny_checkpoints import write_tiny

PROMPT = [(7 * index * index + 3) % 97 for index in range(41)]
NEIGHBOUR = [(5 * index + 11) % 97 for index in range(40)]
TOKENS = 16


BEST, *OTHERS = instruction_sets()
FAMILIES = [
    *("llama", "gemma3", "granite_hybrid", "qwen3", "ministral3", "gpt_oss", "deepseek_v3", "gemma4", "qwen3_next"),
    "qwen3_5",
]
CASES = [
    *((family, BEST) for family in FAMILIES),
    *((family, own) for family in ("llama", "granite_hybrid", "deepseek_v3", "qwen3_5") for own in OTHERS),
]
"""Families with the best instruction set, and those with kernels of their own with all others."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "instruction_set"), CASES)
def test_greedy_tokens_are_those_of_transformers(
    family: str, instruction_set: str, tmp_path: Path, paged_contexts: Any
) -> None:
    reference = write_tiny(tmp_path, family)
    model = load_model(tmp_path, torch.float32, NativeKernels(2, instruction_set), torch.device("cpu"))
    contexts = paged_contexts(model, 2, 128)
    contexts.step({0: PROMPT[:20], 1: NEIGHBOUR[:12]})
    tokens, new = [], PROMPT[20:]
    for step in range(TOKENS):
        logits = contexts.step({1: NEIGHBOUR[12 + step : 13 + step], 0: new})[0]
        new = [int(logits[-1].argmax())]
        tokens += new
    with torch.inference_mode():
        # One pass over the prompt and these tokens: each must be the best after those before it.
        best = reference(torch.tensor([PROMPT + tokens[:-1]]), use_cache=False).logits[0].argmax(dim=-1)
    assert tokens == best[len(PROMPT) - 1 :].tolist()
