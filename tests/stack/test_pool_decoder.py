"""A stack of a decoder that embeds: prefill workers, and no decode workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import psutil
import pytest
import torch
import transformers

from tests.pooling_folders import LETTERS, write_letters, write_modules
from tests.stack.processes import Stack, serve
from tests.tiny_checkpoints import write_tiny

pytestmark = pytest.mark.stack

TEXTS = [" ".join((9 * LETTERS)[index % 7 :][: 1 + 3 * index % 200]) for index in range(160)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[transformers.PreTrainedModel, Callable[[str], list[int]]]:
    folder = tmp_path_factory.getbasetemp() / "decoder" / "embedder"
    folder.mkdir(parents=True)
    reference = write_tiny(folder, "qwen3", head="Model")
    write_modules(folder, "lasttoken", normalize=True, prompts={"query": "q u e r y : "})
    return reference, write_letters(folder)


@pytest.fixture(scope="module")
def stack(
    model: tuple[transformers.PreTrainedModel, Callable[[str], list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = tmp_path_factory.getbasetemp() / "decoder"
    options = ("--prefill=2", "--threads=1", "--max-batched-tokens=64", "--max-seqs=16")
    with serve(folder / "log", str(folder / "embedder"), *options) as running:
        yield running


def embed(stack: Stack, texts: list[str]) -> np.ndarray:
    answer = httpx.post(f"{stack.url}/v1/embeddings", json={"input": texts, "model": "embedder"}, timeout=120)
    assert answer.status_code == 200, answer.text
    return np.array([each["embedding"] for each in answer.json()["data"]], dtype=np.float32)


def workers(stack: Stack, role: str) -> list[psutil.Process]:
    return [child for child in stack.family() if role in child.cmdline()]


def test_vectors_stay_the_same_while_a_worker_is_killed(
    stack: Stack, model: tuple[transformers.PreTrainedModel, Callable[[str], list[int]]]
) -> None:
    reference, encode = model
    found = embed(stack, TEXTS)
    for text, vector in zip(TEXTS[:40], found, strict=False):
        with torch.no_grad():
            last = reference(torch.tensor([encode(text)])).last_hidden_state[0, -1]
        assert np.abs(torch.nn.functional.normalize(last, dim=0).numpy() - vector).max() < 2e-5
    prefill = workers(stack, "prefill")
    assert (len(prefill), workers(stack, "decode")) == (2, [])
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(embed, stack, TEXTS[index::4]) for index in range(4) for _ in range(3)]
        prefill[0].kill()
        for number, answer in enumerate(asked):
            assert np.array_equal(answer.result(), found[number // 3 :: 4])


def test_requests_for_text_are_told_what_the_model_does(stack: Stack) -> None:
    models = httpx.get(f"{stack.url}/v1/models").json()["data"]
    assert models[0]["tasks"] == ["embed", "token_embed"]
    body = {"model": "embedder", "prompt": "a b"}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert "/v1/embeddings" in answer.text
