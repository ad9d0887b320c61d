"""What `/openapi.json` says is what clients get."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paceline.core.config import GatewayConfig
from paceline.services.gateway.app import create_app
from paceline.services.gateway.gateway import Gateway, load_models
from tests.services.gateway.conftest import Stack, StartStack, eventually
from tests.services.gateway.toy_pooling import write_toy_encoder

Json = dict[str, Any]

ALL = {"prompt_logprobs": 1, "return_token_ids": True, "seed": 0, "max_tokens": 3}
STREAM = {"return_token_ids": True, "seed": 0, "max_tokens": 3, "stream": True}
STREAM |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
MESSAGES = [{"role": "user", "content": "hi"}]
LABELLER = "BertForSequenceClassification"

EVENT = {"index": 0, "token_ids": [97]}
SCORE = {"token_id": 226, "logprob": -1.0}
PENDING = {"index": 0, "token_ids": [226], "logprobs": {"content": [{**SCORE, "top_logprobs": [SCORE]}]}}
"""An event whose token begins a character, so that its logprob waits."""

POSTED: list[tuple[str, Json]] = [
    ("/v1/completions", {"prompt": "ab", "max_tokens": 2}),
    ("/v1/completions", {"prompt": ["ab", "c"], "logprobs": 1, "echo": True, **ALL}),
    ("/v1/completions", {"prompt": "ab", "logprobs": 1, **STREAM}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, **ALL}),
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, **STREAM}),
    ("/tokenize", {"prompt": "ab"}),
    ("/tokenize", {"messages": MESSAGES, "return_token_strs": True}),
    ("/detokenize", {"tokens": [97]}),
    ("/v1/chat/completions/batch", {"messages": [MESSAGES, MESSAGES], "logprobs": True, **ALL}),
    ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"max_tokens": 2, "logprobs": 1}}),
    ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"max_tokens": 2}, "stream": True}),
    ("/abort_requests", {"request_ids": ["x"]}),
    ("/v1/completions/render", {"prompt": ["ab", "c"]}),
    ("/v1/chat/completions/render", {"messages": MESSAGES}),
    ("/v1/completions/derender", {"generate_responses": [{"choices": [{"index": 0, "token_ids": [97]}]}]}),
    ("/v1/chat/completions/derender", {"generate_response": {"choices": [{"index": 0, "token_ids": [97]}]}}),
    ("/v1/completions/derender", {"stream": True, "generate_chunk": {"choices": []}}),
    ("/v1/chat/completions/derender", {"stream": True, "generate_chunk": {"choices": [EVENT], "usage": {}}}),
    ("/v1/chat/completions/derender", {"stream": True, "generate_chunk": {"choices": [PENDING]}}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3, "stream": True}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3, "stream": True}),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/score", {"text_1": "q", "text_2": ["a"]}),
    ("/rerank", {"query": "q", "documents": ["a", "b"], "top_n": 1}),
    ("/reset_prefix_cache", {}),
]
REFUSED: list[tuple[str, Json]] = [
    ("/v1/completions", {"prompt": "ab", "n": "x"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "model": "other"}),
    ("/v1/messages", {"messages": MESSAGES}),
    ("/v1/responses", {"input": 7}),
    ("/v1/responses/other/cancel", {}),
    ("/fleet/scale", {"decode": 1}),
]
GOT = (
    "/server_info",
    "/v1/models",
    "/v1/models/toy",
    "/health",
    "/ping",
    "/version",
    "/load",
    "/metrics",
    "/fleet",
    "/fleet/scale",
    "/fleet/steps",
    "/console/requests",
)


def test_every_operation_says_what_it_answers(toy_model: Path, recwarn: pytest.WarningsRecorder) -> None:
    config = GatewayConfig(model=str(toy_model))
    schema = create_app(Gateway(config, load_models(config))).openapi()
    assert not recwarn.list
    operations = [operation for path in schema["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for operation in operations:
        responses = operation["responses"]
        assert {"4XX", "5XX"} < set(responses), operation["operationId"]
        for response in responses.values():
            assert all(content["schema"] for content in response.get("content", {}).values()), operation["operationId"]
    for reference in _references(schema):
        assert reference in schema["components"]["schemas"]


async def test_answers_are_as_described(start_stack: StartStack) -> None:
    stack = await start_stack(score_tokens="y, n")
    await stack.add("kvtransfer", "kv-0")
    schema = _strict((await stack.http.get("/openapi.json")).json())
    for path, body in POSTED + REFUSED:
        response = await stack.http.post(path, json=body, headers={"x-request-id": "asked"})
        assert response.is_success == ((path, body) in POSTED), response.text
        _check(schema, path, "post", response)
    for path in (*GOT, "/trace/asked"):
        _check(schema, path, "get", await stack.http.get(path))
    kept = (await stack.post("/v1/responses", input="hi", max_output_tokens=3)).json()["id"]
    for path in (f"/v1/responses/{kept}/input_items", f"/v1/responses/{kept}"):
        _check(schema, path, "get", await stack.http.get(path))
    for path in (f"/v1/responses/{kept}", f"/v1/responses/{kept}"):
        _check(schema, path, "delete", await stack.http.delete(path))


VECTORS: list[tuple[str, Json]] = [
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": "a" * 99, "truncate_prompt_tokens": -1}),
    ("/v2/embed", {"texts": ["a"], "embedding_types": ["float", "int8", "uint8", "binary", "ubinary", "base64"]}),
    ("/v1/embed", {"texts": ["a" * 99]}),
    ("/pooling", {"input": "a"}),
    ("/pooling", {"input": "a", "task": "token_embed"}),
    ("/embed", {"inputs": "a"}),
    ("/embed_all", {"inputs": "a"}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
    ("/score", {"text_1": "q", "text_2": ["a"]}),
    ("/rerank", {"query": "q", "documents": ["a", "b"], "top_n": 1}),
    ("/rerank", {"query": "q", "texts": ["a", "b"], "return_text": True}),
    ("/classify", {"input": "a"}),
    ("/embed", {"inputs": "a" * 99}),
    ("/rerank", {"query": "q", "texts": ["a" * 99]}),
]
LABELS: list[tuple[str, Json]] = [
    ("/classify", {"input": "a"}),
    ("/predict", {"inputs": "a"}),
    ("/predict", {"inputs": [["a"], ["a", "b"]]}),
    ("/embed", {"inputs": "a"}),
]


async def test_answers_with_vectors_and_labels_are_as_described(start_stack: StartStack, tmp_path: Path) -> None:
    for architecture, labels, asked, refused in (("BertModel", 0, VECTORS, 3), (LABELLER, 2, LABELS, 1)):
        model = write_toy_encoder(tmp_path / architecture, architecture, labels)
        stack = await start_stack(prefill=0, decode=0, pool=1, model=str(model))
        schema = _strict((await stack.http.get("/openapi.json")).json())
        for index, (path, body) in enumerate(asked):
            response = await stack.http.post(path, json=body)
            assert response.is_success == (index < len(asked) - refused), response.text
            _check(schema, path, "post", response)
        for path in ("/v1/models", "/info"):
            _check(schema, path, "get", await stack.http.get(path))


async def test_stored_things_are_as_described(start_stack: StartStack, tmp_path: Path) -> None:
    stack = await start_stack(store=str(tmp_path / "store.db"))
    schema = _strict((await stack.http.get("/openapi.json")).json())
    upload = await stack.http.post("/v1/files", files={"file": ("a.jsonl", b"{}\n")}, data={"purpose": "batch"})
    made = await stack.post("/v1/conversations", items=MESSAGES)
    params = {"messages": MESSAGES, "max_tokens": 1, "model": "toy"}
    batch = await stack.post("/v1/messages/batches", requests=[{"custom_id": "x", "params": params}])
    for path, answer in (("/v1/files", upload), ("/v1/conversations", made), ("/v1/messages/batches", batch)):
        _check(schema, path, "post", answer)
        _check(schema, path + "/{id}", "get", await stack.http.get(f"{path}/{answer.json()['id']}"))
    for path in ("/v1/files", "/v1/messages/batches", "/v1/batches"):
        _check(schema, path, "get", await stack.http.get(path))
    results = f"/v1/messages/batches/{batch.json()['id']}/results"

    async def has_ended() -> bool:
        return (await stack.http.get(results)).is_success

    await eventually(has_ended)
    for path in (results, f"/v1/files/{upload.json()['id']}/content", f"/v1/conversations/{made.json()['id']}/items"):
        _check(schema, path, "get", await stack.http.get(path))


async def test_a_fleet_that_cannot_serve_answers_as_described(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0)
    schema = _strict((await stack.http.get("/openapi.json")).json())
    _check(schema, "/health", "get", await stack.http.get("/health"))
    _check(schema, "/v1/completions", "post", await stack.post("/v1/completions", prompt="x"))


async def test_a_path_says_all_methods_that_it_takes(stack: Stack) -> None:
    for path, methods in (("/ping", "GET, POST, HEAD"), ("/fleet/scale", "GET, POST, HEAD"), ("/tokenize", "POST")):
        assert (await stack.http.delete(path)).headers["allow"] == methods


def _check(schema: Json, path: str, method: str, response: Any) -> None:
    template = next(known for known in sorted(schema["paths"], key=lambda known: "{" in known) if _fits(known, path))
    responses = schema["paths"][template][method]["responses"]
    status = str(response.status_code)
    described = responses.get(status) or responses[f"{status[0]}XX"]
    if not response.content:
        assert "content" not in described, path
        return
    media = response.headers["content-type"].partition(";")[0]
    own = described["content"][media]["schema"]
    bodies = (
        [response.text]
        if media in ("text/plain", "application/jsonl", "application/x-jsonl")
        else [json.loads(text) for text in _texts(media, response.text)]
    )
    for body in bodies:
        jsonschema.validate(body, {**own, "components": schema["components"]}, jsonschema.Draft202012Validator)


def _fits(template: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path) is not None


def _texts(media: str, text: str) -> list[str]:
    if media != "text/event-stream":
        return [text]
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [each for each in data if each != "[DONE]"]


def _strict(schema: Any) -> Any:
    """Return a schema whose objects have no properties but the described ones."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if schema.get("type") == "object" and "properties" in schema else {}
    return {**closed, **{name: _strict(value) for name, value in schema.items()}}


def _references(schema: Any) -> list[str]:
    values = schema if isinstance(schema, list) else list(schema.values()) if isinstance(schema, dict) else []
    own = (
        [schema["$ref"].rpartition("/")[2]] if isinstance(schema, dict) and isinstance(schema.get("$ref"), str) else []
    )
    return own + [reference for value in values for reference in _references(value)]
