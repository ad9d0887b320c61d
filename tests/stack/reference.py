"""The reference for Paceline's tokens: what `transformers` generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from paceline.models.gguf.file import read_whole

_SHORT = 64
"""Prompts of at most this many tokens are computed in one batch."""

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is the boiling point of water in Celsius?\nA:",
    "Liebe Grüße aus München! Heute",
    "import numpy as np\n\nx = np.array([1, 2, 3])\nprint(",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "To be, or not to be, that is the question:",
    "List three colours:\n1.",
    "SELECT name, age FROM users WHERE",
    "Paris is to France as Tokyo is to",
    '{"name": "Alice", "age": 30, "city":',
    "The mitochondria is",
    "Translate to Spanish: Good morning, my friends.\n",
    "In the beginning God created",
    "日本の首都は",
    "🙂 Emoji are",
    "A long list of numbers: " + " ".join(str(n) for n in range(150)),
    "#include <stdio.h>\n\nint main(void) {\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "The theory of relativity says that",
    "x",
    "   leading spaces and\ttabs\n\n\n",
    "Roses are red,\nViolets are blue,\n",
    "The following is a conversation between a patient and a doctor.\nPatient: I have a headache.\nDoctor:",
    "HTTP/1.1 200 OK\nContent-Type:",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n",
    "Monday, Tuesday, Wednesday,",
    "The history of the Roman Empire begins with the founding of the city. " * 20,
    "Why did the chicken cross the road?",
    "<html>\n<head>\n<title>",
)


def tokenize(folder: Path, prompts: tuple[str, ...]) -> list[list[int]]:
    """Return the token ids of each prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer(prompt).input_ids for prompt in prompts]


def load_reference(folder: Path) -> transformers.PreTrainedModel:
    """Return the model of a folder in fp32, also if its matrices are in a GGUF file."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model: transformers.PreTrainedModel = kind.from_pretrained(
        None, config=config, state_dict=read_whole(folder), dtype=torch.float32
    ).eval()
    model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def generate(folder: Path, prompts: tuple[str, ...], max_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts' token ids, and the greedy tokens after each prompt, computed in fp32.

    Generation stops after an end token or `max_tokens` tokens.
    """
    model = load_reference(folder)
    inputs, outputs = tokenize(folder, prompts), [list[int]()] * len(prompts)
    # In two batches, so that short prompts are not padded to the length of long ones.
    short = [index for index, prompt in enumerate(inputs) if len(prompt) <= _SHORT]
    for batch in (short, [index for index in range(len(prompts)) if index not in short]):
        if batch:
            for index, tokens in zip(batch, _generate(model, [inputs[index] for index in batch], max_tokens)):
                outputs[index] = tokens
    return inputs, outputs


def _generate(model: transformers.PreTrainedModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    longest = max(map(len, prompts))
    generated = model.generate(
        torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    ends = model.generation_config.eos_token_id
    return [_until(row, ends if isinstance(ends, list) else [ends]) for row in generated[:, longest:].tolist()]


def _until(tokens: list[int], ends: list[int]) -> list[int]:
    """Return the tokens up to the first end token, including it."""
    return tokens[: next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))]
