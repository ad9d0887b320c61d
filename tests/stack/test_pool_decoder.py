"""A stack of decoders that embed and rank: prefill workers, and no decode workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
import transformers

from tests.pooling_folders import LETTERS, NO, YES, write_letters, write_modules
from tests.stack.processes import Stack, serve
from tests.tiny_checkpoints import write_tiny

pytestmark = pytest.mark.stack

TEXTS = [" ".join((9 * LETTERS)[index % 7 :][: 1 + 3 * index % 200]) for index in range(160)]


TEMPLATE = """{%- set query = (messages | selectattr("role", "eq", "query") | first).content -%}
{%- set document = (messages | selectattr("role", "eq", "document") | first).content -%}
j u d g e query {{ query }} document {{ document }} t h i n k"""
Encode = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decoders")


@pytest.fixture(scope="module")
def embedder(folder: Path) -> tuple[transformers.PreTrainedModel, Encode]:
    """A model like Qwen3-Embedding."""
    own = folder / "embedder"
    own.mkdir()
    reference = write_tiny(own, "qwen3", head="Model")
    write_modules(own, "lasttoken", normalize=True, prompts={"query": "q u e r y : "})
    return reference, write_letters(own)


@pytest.fixture(scope="module")
def reranker(folder: Path) -> tuple[transformers.PreTrainedModel, Encode]:
    """A model like Qwen3-Reranker."""
    own = folder / "reranker"
    own.mkdir()
    reference = write_tiny(own, "qwen3", tie_word_embeddings=True)
    write_modules(own, score_tokens=(YES, NO))
    (own / "chat_template.jinja").write_text(TEMPLATE)
    return reference, write_letters(own, end=False)


@pytest.fixture(scope="module")
def stack(embedder: object, reranker: object, folder: Path) -> Iterator[Stack]:
    models = folder / "models.toml"
    models.write_text(
        f"""
        [embedder]
        model = "{folder / "embedder"}"
        [reranker]
        model = "{folder / "reranker"}"
        """
    )
    options = ("--threads=1", "--max-batched-tokens=64", "--max-seqs=16", "--kv-memory=16MiB")
    with serve(folder / "log", f"--models-file={models}", *options, fleets=2) as running:
        yield running


def embed(stack: Stack, texts: list[str]) -> np.ndarray:
    answer = httpx.post(f"{stack.url}/v1/embeddings", json={"input": texts, "model": "embedder"}, timeout=120)
    assert answer.status_code == 200, answer.text
    return np.array([each["embedding"] for each in answer.json()["data"]], dtype=np.float32)


def workers(stack: Stack, role: str) -> list[psutil.Process]:
    return [child for child in stack.family() if role in child.cmdline()]


def test_vectors_stay_the_same_while_a_worker_is_killed(
    stack: Stack, embedder: tuple[transformers.PreTrainedModel, Encode]
) -> None:
    reference, encode = embedder
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


def test_scores_are_those_of_two_tokens_after_the_template(
    stack: Stack, reranker: tuple[transformers.PreTrainedModel, Encode]
) -> None:
    reference, encode = reranker
    body = {"model": "reranker", "query": "a b c", "documents": TEXTS[:12]}
    results = httpx.post(f"{stack.url}/v1/rerank", json=body, timeout=60).json()["results"]
    expected = []
    for document in TEXTS[:12]:
        with torch.no_grad():
            prompt = f"j u d g e query a b c document {document} t h i n k"
            logits = reference(torch.tensor([encode(prompt)])).logits[0, -1]
        expected.append(float((logits[YES] - logits[NO]).sigmoid()))
    assert [each["index"] for each in results] == sorted(range(12), key=lambda index: -expected[index])
    assert [each["relevance_score"] for each in results] == pytest.approx(sorted(expected, reverse=True), abs=2e-5)


def test_requests_for_text_are_told_what_the_model_does(stack: Stack) -> None:
    models = httpx.get(f"{stack.url}/v1/models").json()["data"]
    assert {model["id"]: model["tasks"] for model in models} == {
        "embedder": ["embed", "token_embed"],
        "reranker": ["score"],
    }
    body = {"model": "embedder", "prompt": "a b"}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert "/v1/embeddings" in answer.text
