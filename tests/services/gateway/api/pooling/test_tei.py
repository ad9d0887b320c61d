"""The routes of TEI."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.services.gateway.conftest import Stack
from tests.services.gateway.toy_pooling import DIM


async def test_vectors_are_bare_lists(embedder: Stack) -> None:
    vector = np.eye(DIM)[1]
    for path, body, expected in (
        ("/embed", {"inputs": "aa"}, [vector]),
        ("/", {"inputs": ["aa", [113]]}, [vector, vector]),
        ("/embed", {"inputs": ["aa"], "normalize": False}, [2 * vector]),
        ("/embed", {"inputs": ["aa"], "dimensions": 8}, [vector[:8]]),
        ("/embed", {"inputs": "aaaa" * 20, "truncate": True, "normalize": False}, [63 * vector]),
        ("/embed_all", {"inputs": "aa"}, [[vector, vector]]),
    ):
        answer = await embedder.post(path, **body)
        assert answer.status_code == 200, answer.text
        assert np.array(answer.json()) == pytest.approx(np.array(expected)), body


async def test_a_prompt_is_named(embedder: Stack) -> None:
    assert (await embedder.post("/embed", inputs="a", prompt_name="query")).status_code == 200
    (one,) = embedder.workers["pool-0"].calls[-1].work.pool.inputs
    assert bytes(one.token_ids[:4]) == b"q: a"


async def test_similarity(embedder: Stack) -> None:
    answer = await embedder.post("/similarity", inputs={"source_sentence": "aab", "sentences": ["aab", "c", "a"]})
    assert answer.json() == pytest.approx([1, 0, 2 / 5**0.5])


async def test_predictions_are_sorted(labeller: Stack) -> None:
    for inputs, expected in (
        ("aab", [("odd", 2 / 3), ("even", 1 / 3)]),
        (["aab"], [("odd", 2 / 3), ("even", 1 / 3)]),
        (["aa", "b"], [("odd", 2 / 3), ("even", 1 / 3)]),  # one pair
        ([["bb"], ["a", "a"]], [[("even", 1), ("odd", 0)], [("odd", 1), ("even", 0)]]),
    ):
        answer = (await labeller.post("/predict", inputs=inputs)).json()
        lists: Any = answer if isinstance(answer[0], list) else [answer]
        wanted: Any = expected if isinstance(expected[0], list) else [expected]
        for told, want in zip(lists, wanted, strict=True):
            assert [(each["label"], pytest.approx(each["score"])) for each in told] == want
    raw = (await labeller.post("/predict", inputs="aab", raw_scores=True)).json()
    assert raw == [{"score": 2, "label": "odd"}, {"score": 1, "label": "even"}]


async def test_info(embedder: Stack, labeller: Stack) -> None:
    told = (await embedder.http.get("/info")).json()
    assert (told["model_id"], told["max_input_length"]) == ("toy", 64)
    assert told["model_type"] == {"embedding": {"pooling": "mean"}}
    kind = (await labeller.http.get("/info")).json()["model_type"]
    assert kind == {"classifier": {"id2label": {"0": "even", "1": "odd"}, "label2id": {"even": 0, "odd": 1}}}


async def test_tokens_and_their_texts(embedder: Stack) -> None:
    answer = await embedder.post("/tokenize", inputs=["ab", "c"])
    end = {"id": 256, "text": "<|end|>", "special": True, "start": None, "stop": None}
    letters = [{"id": ord(each), "text": each, "special": False} for each in "abc"]
    places = [{"start": index, "stop": index + 1} for index in (0, 1)]
    first, second = [{**letters[0], **places[0]}, {**letters[1], **places[1]}, end], [{**letters[2], **places[0]}, end]
    assert answer.json() == [first, second]
    assert (await embedder.post("/tokenize", inputs="ab", add_special_tokens=False)).json() == [first[:2]]
    named = (await embedder.post("/tokenize", inputs="a", prompt_name="query")).json()[0]
    assert "".join(each["text"] for each in named) == "q: a<|end|>"
    # vLLM's form has a field of another name.
    assert (await embedder.post("/tokenize", prompt="ab")).json()["tokens"] == [97, 98, 256]
    ids = [each["id"] for each in first]
    assert (await embedder.post("/decode", ids=ids)).json() == ["ab"]
    assert (await embedder.post("/decode", ids=[ids, [99]], skip_special_tokens=False)).json() == ["ab<|end|>", "c"]


ERRORS: list[tuple[str, dict[str, Any], int, str]] = [
    ("/embed", {"inputs": "a" * 100}, 413, "validation"),
    ("/embed", {"inputs": ["a"] * 2049}, 413, "validation"),
    ("/embed", {"inputs": []}, 400, "empty"),
    ("/embed", {"inputs": 5}, 422, "tokenizer"),
    ("/embed", {"inputs": "a", "prompt_name": "poetry"}, 422, "tokenizer"),
    ("/embed", {"inputs": [10**6]}, 422, "tokenizer"),
    ("/predict", {"inputs": "a"}, 424, "backend"),
    ("/embed_sparse", {"inputs": "a"}, 424, "backend"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "empty"),
    ("/tokenize", {"inputs": []}, 400, "empty"),
    ("/tokenize", {"inputs": ["a"] * 2049}, 413, "validation"),
    ("/tokenize", {"inputs": ["a" * 900_000] * 6}, 413, "validation"),
    ("/decode", {"ids": [10**6]}, 422, "tokenizer"),
    ("/decode", {"ids": []}, 400, "empty"),
]


async def test_errors_have_the_form_of_tei(embedder: Stack) -> None:
    for path, body, status, kind in ERRORS:
        answer = await embedder.post(path, **body)
        assert (answer.status_code, answer.json().get("error_type")) == (status, kind), (path, answer.text)
        assert isinstance(answer.json()["error"], str)
