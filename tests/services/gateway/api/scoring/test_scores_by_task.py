"""/score and /rerank by models that pool: the task of the model decides how documents are scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.conftest import Stack, StartStack
from tests.services.gateway.toy_pooling import PROMPTS, write_toy_encoder


@pytest.fixture
async def reader(start_stack: StartStack, tmp_path: Path) -> Stack:
    """A stack with a model that reads a query and a document together."""
    model = write_toy_encoder(tmp_path / "toy", "BertForSequenceClassification", labels=1)
    return await start_stack(prefill=0, decode=0, pool=1, model=str(model))


@pytest.fixture
async def embedder(start_stack: StartStack, tmp_path: Path) -> Stack:
    model = write_toy_encoder(tmp_path / "toy", prompts=PROMPTS)
    return await start_stack(prefill=0, decode=0, pool=1, model=str(model))


@pytest.fixture
async def late(start_stack: StartStack, tmp_path: Path) -> Stack:
    """A stack with a model of vectors for tokens."""
    return await start_stack(prefill=0, decode=0, pool=1, model=str(write_toy_encoder(tmp_path / "toy", "ColBert")))


async def scores(stack: Stack, path: str = "/score", **body: Any) -> list[float]:
    answer = await stack.post(path, **body)
    assert answer.status_code == 200, answer.text
    return [each["score"] for each in answer.json()["data"]]


async def test_a_model_reads_both_texts(reader: Stack) -> None:
    assert await scores(reader, queries="ab", documents=["abc", "b", "xy"]) == pytest.approx([2 / 3, 1, 0])
    assert await scores(reader, text_1=["a", "b"], text_2=["a", "a"]) == [1, 0]
    assert await scores(reader, text_1="a", text_2="a", use_activation=False) == [10]
    call = reader.workers["pool-0"].calls[-1]
    assert call.work.pool.inputs[0].second_start == 2
    assert await scores(reader, text_1="a", text_2="") == [0]
    answer = (await reader.post("/score", text_1="ab", text_2=["c", "d"])).json()
    assert answer["usage"] == {"prompt_tokens": 10, "total_tokens": 10}


async def test_cosines_of_embeddings_with_the_prompts_of_each_side(embedder: Stack) -> None:
    found = await scores(embedder, queries="b", documents=["b", "bcc"])
    # The two calls run side by side, so either may come first.
    calls = [call.work.pool.inputs for call in embedder.workers["pool-0"].calls]
    texts = [[bytes(one.token_ids[:-1]).decode() for one in inputs] for inputs in calls]
    assert sorted(texts) == [["d: b", "d: bcc"], ["q: b"]]
    assert found == pytest.approx([3 / 4, 3 / (2 * 8**0.5)])
    answer = (await embedder.post("/rerank", query="zz", documents=["ab", "zz", "zy"], top_n=2)).json()
    assert [each["index"] for each in answer["results"]] == [1, 2]
    assert answer["usage"]["prompt_tokens"] == 4 * 6


async def test_the_best_product_of_each_token(late: Stack) -> None:
    # Letters with the same last four bits have the same vector.
    assert await scores(late, queries="abc", documents=["a", "aq", "bc", "abcxyz", "zz"]) == [1, 1, 2, 3, 0]


async def test_a_query_is_computed_once(embedder: Stack) -> None:
    await scores(embedder, text_1=["a", "b", "a"], text_2=["x", "y", "z"])
    query, documents = (call.work.pool.inputs for call in embedder.workers["pool-0"].calls)
    assert (len(query), len(documents)) == (2, 3)


async def test_the_forms_of_rerank(reader: Stack) -> None:
    body = {"query": "ab", "documents": ["x", {"text": "ab"}, "a"]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = (await reader.post(path, **body)).json()
        assert [(each["index"], each["relevance_score"]) for each in answer["results"]] == [(1, 1), (2, 1), (0, 0)]
        assert answer["results"][0]["document"] == {"text": "ab"}
    tei = {"query": "ab", "texts": ["x", "ab"]}
    assert (await reader.post("/rerank", **tei)).json() == [{"index": 1, "score": 1}, {"index": 0, "score": 0}]
    answer = (await reader.post("/rerank", **tei, return_text=True, raw_scores=True)).json()
    assert answer == [{"index": 1, "score": 10, "text": "ab"}, {"index": 0, "score": 0, "text": "x"}]
    refused = await reader.post("/rerank", query="ab", texts=["x" * 100])
    assert (refused.status_code, refused.json()["error_type"]) == (413, "validation")
    assert (await reader.post("/rerank", query="ab", texts=["x" * 100], truncate=True)).status_code == 200
    refused = await reader.post("/rerank", query="ab")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")


async def test_texts_are_cut_before_they_are_scored(reader: Stack, embedder: Stack) -> None:
    body: dict[str, Any] = {"query": "abcd", "documents": ["aaxx"], "max_tokens_per_query": 1, "max_tokens_per_doc": 3}
    for stack, texts in ((reader, ["a", "aax"]), (embedder, ["q: a", "d: aax"])):
        assert (await stack.post("/rerank", **body)).status_code == 200
        inputs = [one for call in stack.workers["pool-0"].calls for one in call.work.pool.inputs]
        told = [bytes(token if token < 256 else 0 for token in one.token_ids).decode() for one in inputs]
        assert [part for text in told for part in text.split("\0") if part] == texts


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"query": "a", "documents": ["b"], "instruction": "be kind"}, "instruction"),
    ({"query": "a", "documents": ["b" * 100]}, "documents[0]"),
    ({"query": "a", "documents": ["b"], "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
]


async def test_refusals(reader: Stack, embedder: Stack, late: Stack) -> None:
    for stack in (reader, embedder, late):
        for body, param in REFUSED:
            answer = await stack.post("/rerank", **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (body, answer.text)
