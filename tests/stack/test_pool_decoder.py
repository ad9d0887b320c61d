"""A stack of decoders that embed and rank texts and pages: prefill workers, and no decode workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import tokenizers
import torch
import transformers

from tests.pooling_folders import LETTERS, NO, YES, write_letters, write_modules
from tests.retriever_folders import ColQwen
from tests.services.gateway.toy_model import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, write_toy_vision_model
from tests.stack.media_chats import image_part
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


PAGE_PROMPT = "<|user|><|vision_start|><|image_pad|><|vision_end|>Describe the image.<|end|>"


@pytest.fixture(scope="module")
def retriever(folder: Path) -> ColQwen:
    """A model like ColQwen3.5, whose checkpoint says how queries and pages are written."""
    own = folder / "pages"
    write_toy_vision_model(own)
    sizes = {"size": {"shortest_edge": 64, "longest_edge": 4096}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (own / "preprocessor_config.json").write_text(json.dumps(sizes))
    settings = {"query_prefix": "Query: ", "query_augmentation_token": "<|end|>", "visual_prompt_prefix": PAGE_PROMPT}
    ids = (IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END)
    return ColQwen(own, "bidirectional", media_tokens=ids, vocab_size=272, **settings)


@pytest.fixture(scope="module")
def stack(embedder: object, reranker: object, retriever: object, folder: Path) -> Iterator[Stack]:
    models = folder / "models.toml"
    models.write_text(
        f"""
        [embedder]
        model = "{folder / "embedder"}"
        [reranker]
        model = "{folder / "reranker"}"
        [pages]
        model = "{folder / "pages"}"
        """
    )
    options = ("--threads=1", "--max-batched-tokens=64", "--max-seqs=16", "--kv-memory=16MiB")
    with serve(folder / "log", f"--models-file={models}", *options, fleets=3) as running:
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
    assert (len(prefill), workers(stack, "decode")) == (3, [])
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


def pool(stack: Stack, **body: object) -> list[np.ndarray]:
    answer = httpx.post(f"{stack.url}/pooling", json={"model": "pages", "task": "token_embed", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return [np.array(each["data"], dtype=np.float32) for each in answer.json()["data"]]


def test_pages_have_a_vector_for_each_token_and_queries_are_written_as_the_checkpoint_says(
    stack: Stack, retriever: ColQwen, folder: Path
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "pages" / "tokenizer.json"))
    draw = np.random.default_rng(5)
    images = [draw.integers(0, 256, (24, 40, 3), dtype=np.uint8) for _ in range(2)]
    begin, end = PAGE_PROMPT.split("<|image_pad|>")
    ids = [*tokenizer.encode(begin).ids, *[IMAGE_PAD] * 15, *tokenizer.encode(end).ids]
    messages = [[{"role": "user", "content": [image_part(pixels)]}] for pixels in images]
    pages = pool(stack, messages=messages)
    for pixels, found in zip(images, pages, strict=True):
        assert np.abs(found - retriever.vectors(ids, torch.from_numpy(pixels)).numpy()).max() < 2e-5
    assert np.array_equal(pool(stack, messages=messages[1])[0], pages[1])
    query, text = pool(stack, input="a cat", prompt_name="query"), pool(stack, input="a cat")
    for (found,), own in ((query, "Query: a cat" + 10 * "<|end|>"), (text, "a cat")):
        assert np.abs(found - retriever.vectors(tokenizer.encode(own).ids).numpy()).max() < 2e-5
    with_words = [{"role": "user", "content": [{"type": "text", "text": "x"}, image_part(images[0])]}]
    (found,) = pool(stack, messages=with_words)
    assert len(found) != len(pages[0])


def test_requests_for_text_are_told_what_the_model_does(stack: Stack) -> None:
    models = httpx.get(f"{stack.url}/v1/models").json()["data"]
    assert {model["id"]: model["tasks"] for model in models} == {
        "embedder": ["embed", "token_embed"],
        "reranker": ["score"],
        "pages": ["token_embed"],
    }
    body = {"model": "embedder", "prompt": "a b"}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert "/v1/embeddings" in answer.text
