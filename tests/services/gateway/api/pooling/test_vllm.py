"""The routes /pooling and /classify."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from tests.services.gateway.conftest import Stack, StartStack
from tests.services.gateway.toy_pooling import DIM, write_toy_encoder


async def test_pooling_gives_the_numbers_of_a_task(embedder: Stack) -> None:
    vector = np.eye(DIM)[1]
    for body, expected in (
        ({"input": "aa"}, [vector]),  # embed is the first task of the model
        ({"input": ["aa", "qqq"], "task": "embed"}, [vector, vector]),
        ({"input": [97, 97]}, [vector]),
        ({"input": [[97], [113, 97]]}, [vector, vector]),
        ({"input": "aa", "use_activation": False}, [2 * vector]),
        ({"input": "aa", "dimensions": 8}, [vector[:8]]),
        ({"input": "aa", "task": "token_embed"}, [[vector, vector]]),
    ):
        answer = (await embedder.post("/pooling", **body)).json()
        assert (answer["object"], answer["id"][:5], answer["model"]) == ("list", "pool-", "toy")
        assert [each["index"] for each in answer["data"]] == [*range(len(expected))]
        assert {each["object"] for each in answer["data"]} == {"pooling"}
        for each, values in zip(answer["data"], expected, strict=True):
            assert np.array(each["data"]) == pytest.approx(np.array(values))
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0


async def test_each_encoding_has_the_same_numbers(embedder: Stack) -> None:
    body: dict[str, Any] = {"input": ["abc", "a"], "task": "token_embed"}
    plain = [np.array(each["data"], np.float32) for each in (await embedder.post("/pooling", **body)).json()["data"]]
    coded = (await embedder.post("/pooling", **body, encoding_format="base64", endianness="big")).json()
    for each, values in zip(coded["data"], plain, strict=True):
        assert np.frombuffer(base64.b64decode(each["data"]), ">f4").tolist() == values.ravel().tolist()
    whole = await embedder.post("/pooling", **body, encoding_format="bytes", embed_dtype="float16")
    assert whole.headers["content-type"] == "application/octet-stream"
    about = json.loads(whole.headers["metadata"])
    assert (about["model"], about["usage"]["prompt_tokens"]) == ("toy", 6)
    for item, values in zip(about["data"], plain, strict=True):
        assert (item["shape"], item["embed_dtype"]) == (list(values.shape), "float16")
        part = np.frombuffer(whole.content[item["start"] : item["end"]], "<f2")
        assert part.tolist() == values.ravel().tolist()
    bare = await embedder.post("/pooling", **body, encoding_format="bytes_only", embed_dtype="float16")
    assert (bare.content, "metadata" in bare.headers) == (whole.content, False)


async def test_a_label_is_the_largest_number(labeller: Stack) -> None:
    for path in ("/classify", "/v1/classify"):
        answer = (await labeller.post(path, input=["aac", "aab", "b"])).json()
        assert answer["id"].startswith("classify-")
        shares = [([0, 1], "odd"), ([1 / 3, 2 / 3], "odd"), ([1, 0], "even")]
        assert [(each["label"], each["num_classes"], each["index"]) for each in answer["data"]] == [
            (label, 2, index) for index, (_, label) in enumerate(shares)
        ]
        for each, (probs, _) in zip(answer["data"], shares, strict=True):
            assert each["probs"] == pytest.approx(probs)
    raw = (await labeller.post("/classify", input="aac", use_activation=False)).json()
    assert raw["data"][0]["probs"] == [0, 3]


async def test_a_model_says_what_it_computes(embedder: Stack, labeller: Stack, stack: Stack) -> None:
    for where, path, body, words in (
        (embedder, "/classify", {"input": "a"}, "it computes embeddings (embed) and vectors of tokens (token_embed)"),
        (embedder, "/pooling", {"input": "a", "task": "classify"}, "it computes embeddings"),
        (labeller, "/v2/embed", {"texts": ["a"]}, "it computes labels (classify)"),
        (labeller, "/score", {"text_1": "a", "text_2": "b"}, "it computes labels (classify)"),
        (stack, "/classify", {"input": "a"}, "it computes text"),
        (stack, "/v1/embeddings", {"input": "a"}, "it computes text"),
        (embedder, "/v1/completions", {"prompt": "a"}, "embed"),
    ):
        answer = await where.post(path, **body)
        assert answer.status_code in (400, 404), (path, answer.text)
        assert words in answer.json()["error"]["message"]
    card = (await embedder.http.get("/v1/models")).json()["data"][0]
    assert (card["tasks"], card["embedding_dimensions"]) == (["embed", "token_embed"], DIM)
    assert card["prompts"] == ["query", "document"]
    assert (await stack.http.get("/v1/models/toy")).json()["tasks"] == ["generate"]


async def test_truncation(embedder: Stack) -> None:
    def computed() -> str:
        (one,) = embedder.workers["pool-0"].calls[-1].work.pool.inputs
        return bytes(token for token in one.token_ids if token < 256).decode()

    for fields, text in (
        ({"truncate_prompt_tokens": 5}, "abcd"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, "efgh"),
        ({"truncate_prompt_tokens": -1}, "abcdefgh"),
        ({"truncate_prompt_tokens": 5, "add_special_tokens": False}, "abcde"),
    ):
        answer = (await embedder.post("/pooling", input="abcdefgh", **fields)).json()
        assert computed() == text
        assert answer["usage"].get("prompt_tokens_details", {"truncated_tokens": 0})["truncated_tokens"] == 8 - len(
            text
        )
    for wrong in (65, 0):
        answer = await embedder.post("/pooling", input="a", truncate_prompt_tokens=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_white_space_is_part_of_a_text(embedder: Stack) -> None:
    """As in transformers and sentence-transformers: the model's tokenizer says what it is worth."""
    assert (await embedder.post("/pooling", input=["  a ", " "])).status_code == 200
    work = embedder.workers["pool-0"].calls[-1].work
    assert [bytes(one.token_ids[:-1]).decode() for one in work.pool.inputs] == ["  a ", " "]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input[0]"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", 5]}, "input[1]"),
    ({"input": [10**6]}, "input"),
    ({"input": "a", "task": "plugin"}, "task"),
    ({"input": "a", "task": "nonsense"}, "task"),
    ({"input": "a", "task": "token_embed", "dimensions": 8}, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": ["a"] * 300, "encoding_format": "bytes"}, "encoding_format"),
    ({"input": "a", "padding": "max_length"}, "padding"),
    ({"input": "a" * 100}, "input"),
]


async def test_refusals(embedder: Stack) -> None:
    for body, param in REFUSED:
        answer = await embedder.post("/pooling", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
    assert not embedder.workers["pool-0"].calls


async def test_the_only_model_with_a_task_needs_no_name(start_stack: StartStack, tmp_path: Any, toy_model: Any) -> None:
    file = tmp_path / "models.toml"
    encoder = write_toy_encoder(tmp_path / "encoder")
    file.write_text(f'[chat]\nmodel = "{toy_model}"\n\n[vectors]\nmodel = "{encoder}"\n')
    stack = await start_stack(prefill=0, decode=0, models_file=str(file), model="")
    answer = await stack.post("/v1/embeddings", input="a")
    assert "no worker" in answer.text.lower() or answer.status_code == 503
    answer = await stack.post("/classify", input="a")
    assert (answer.status_code, "serves several models" in answer.text) == (400, True)
