"""The two bundled models give the same tokens as transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from paceline.kernels import select_kernels
from paceline.models.loader import load_model
from paceline.services.gateway.planning import tokenizer as gateway
from tests.stack.reference import load_reference

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
NEW_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a land of " + "very, very " * 8 + "tall mountains,",
]


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_greedy_tokens_are_those_of_transformers(
    name: str, real_model: Callable[[str], Path], paged_contexts: Any
) -> None:
    folder = real_model(name)
    model = load_model(folder, torch.float32, select_kernels(CPU), CPU)
    reference = load_reference(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    contexts = paged_contexts(model, len(prompts), 128)
    step = contexts.step(dict(enumerate(prompts)))
    ours: list[list[int]] = [[] for _ in prompts]
    for _ in range(NEW_TOKENS):
        for request, logits in step.items():
            ours[request].append(int(logits[-1].argmax()))
        step = contexts.step({request: tokens[-1:] for request, tokens in enumerate(ours)})
    for prompt, tokens in zip(prompts, ours):
        with torch.inference_mode():
            # One pass over the prompt and these tokens: each must be the best after those before it.
            best = reference(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0].argmax(dim=-1)
        assert tokens == best[len(prompt) - 1 :].tolist()


def end_token_ids(folder: Path) -> frozenset[int]:
    """The tokens at which the gateway ends an answer."""
    return gateway.Tokenizer(folder).eos_token_ids


def test_smollm2_knows_its_capital_and_its_turn_end(real_model: Callable[[str], Path]) -> None:
    folder = real_model("smollm2-135m-instruct")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.token_to_id("<|im_end|>") in end_token_ids(folder)
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n").ids == [1, 4093, 198, 26843, 2, 198]
    # Digits are split off first, each as a token of its own, so that the two newlines stay one token.
    assert tokenizer.encode("a\n\n12").tokens == ["a", "ĊĊ", "1", "2"]
    assert (folder / "chat_template.jinja").is_file()


def test_gemma_begins_with_bos_and_keeps_its_special_tokens_whole(real_model: Callable[[str], Path]) -> None:
    folder = real_model("gemma-3-270m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert end_token_ids(folder) == {tokenizer.token_to_id("<eos>")}
    assert tokenizer.encode("Hello  world\n\n").tokens == ["<bos>", "Hello", "▁▁", "world", "\n\n"]
    assert tokenizer.encode("<start_of_turn>user", add_special_tokens=False).ids == [105, 2364]
