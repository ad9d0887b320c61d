"""Embeddings in the forms of Cohere's API."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.services.gateway.conftest import Stack
from tests.services.gateway.toy_pooling import DIM


def texts_of(stack: Stack) -> list[str]:
    """Return the texts that the worker got last, without special tokens."""
    work = stack.workers["pool-0"].calls[-1].work
    return [bytes(token for token in one.token_ids if token < 256).decode() for one in work.pool.inputs]


async def test_each_type_of_embeddings(embedder: Stack) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = {"texts": ["aaab", "xyz"], "embedding_types": types, "input_type": "clustering"}
    answer = (await embedder.post("/v2/embed", **body)).json()
    assert (answer["response_type"], answer["texts"]) == ("embeddings_by_type", ["aaab", "xyz"])
    assert answer["meta"]["api_version"] == {"version": "2"}
    assert answer["meta"]["billed_units"] == {"input_tokens": 9}  # with the special token of each
    told = answer["embeddings"]
    first = np.array(told["float"][0], np.float32)
    assert len(told["float"]) == 2
    assert first == pytest.approx(np.eye(DIM)[1] * 3 / 10**0.5 + np.eye(DIM)[2] / 10**0.5)
    assert base64.b64decode(told["base64"][0]) == first.tobytes()
    assert told["int8"][0][:3] == [0, 127, 42]
    assert told["uint8"][0][:3] == [128, 255, 170]
    assert told["ubinary"][0] == [255, 255]
    assert told["binary"][0] == [127, 127]


async def test_version_1_has_a_plain_list(embedder: Stack) -> None:
    answer = (await embedder.post("/v1/embed", texts=["a"])).json()
    assert answer["response_type"] == "embeddings_floats"
    assert len(answer["embeddings"][0]) == DIM
    answer = (await embedder.post("/v1/embed", texts=["a"], embedding_types=["float"])).json()
    assert list(answer["embeddings"]) == ["float"]


async def test_a_purpose_is_a_prompt_of_the_model(embedder: Stack) -> None:
    for purpose, text in (
        ("search_query", "q: a"),
        ("search_document", "d: a"),
        ("document", "d: a"),
        ("classification", "a"),
        (None, "a"),
    ):
        body: dict[str, Any] = {"texts": ["a"], "input_type": purpose}
        assert (await embedder.post("/v2/embed", **body)).status_code == 200
        assert texts_of(embedder) == [text]
    refused = await embedder.post("/v2/embed", texts=["a"], input_type="poetry")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_type")
    assert "'query', 'document'" in refused.json()["error"]["message"]


async def test_texts_are_cut_as_asked_and_the_answer_says_so(embedder: Stack) -> None:
    long = "abcdefgh" * 10
    for truncate, kept in (("END", long[:63]), ("START", long[-63:])):
        answer = (await embedder.post("/v2/embed", texts=[long, "a"], truncate=truncate)).json()
        assert texts_of(embedder)[0] == kept
        assert answer["meta"]["warnings"] == ["1 texts were too long and lost 17 tokens"]
    assert (await embedder.post("/v2/embed", texts=["abcdef"], max_tokens=4)).status_code == 200
    assert texts_of(embedder) == ["abc"]
    refused = await embedder.post("/v2/embed", texts=["a", long], truncate="NONE")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "texts[1]")
    assert "81 tokens" in refused.json()["error"]["message"]


async def test_dimensions(embedder: Stack) -> None:
    for size in (8, DIM):
        answer = (await embedder.post("/v2/embed", texts=["a"], output_dimension=size)).json()
        assert len(answer["embeddings"]["float"][0]) == size
    assert (await embedder.post("/v2/embed", texts=["a"], output_dimension=9)).status_code == 400


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "texts"),
    ({"texts": []}, "texts"),
    ({"texts": [""]}, "texts[0]"),
    ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts"),
    ({"images": ["data:image/png;base64,"]}, "images[0]"),
    ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types[0]"),
    ({"texts": ["a"] * 2049}, "texts"),
]


async def test_refusals(embedder: Stack) -> None:
    for body, param in REFUSED:
        answer = await embedder.post("/v2/embed", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
    mixed = [{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert (await embedder.post("/v2/embed", inputs=mixed)).status_code == 200
    assert texts_of(embedder) == ["a\nb"]
