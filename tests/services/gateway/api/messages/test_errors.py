"""Errors in the form of Anthropic's API."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import grpc
import httpx
import pytest

from paceline.core.errors import BusyError
from tests.services.gateway.api.messages.conftest import Desk
from tests.services.gateway.conftest import StartStack

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: Field required"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": None}, "messages: Field required"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "redacted_thinking"}]}]},
        "'redacted_thinking' is not supported here; send text or image or search_result or document or tool_result",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "http://a"}}]}
            ]
        },
        "messages[0].content[0]: this server reads only documents of text; send a source of type text or",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
        "messages[0].content[0].source: this server keeps no files; send a source of type base64 or url",
    ),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image is not supported; this model takes text alone"),
    ({"messages": [{"role": "user", "content": [CALL]}]}, "content of type 'tool_use' is not"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": [{**CALL, "input": "x"}]}, USER]}, "messages[0].content[0].input"),
    ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "add a message with the tool_result"),
    ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0]: a tool needs a name and an input_schema"),
    ({"tools": [TOOL, TOOL]}, "two functions of the name 'f'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "no function of tools has the name 'g'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs the name of the tool"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    (
        {"tools": [{**TOOL, "strict": True, "input_schema": {"$ref": "http://localhost/x"}}]},
        "tools[0].input_schema: ",
    ),
    ({"thinking": {"type": "some"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "some"}}, "output_config.effort"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "http://localhost/x"}}}},
        "output_config.format.schema: ",
    ),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"temperature": 3}, "temperature"),
    ({"mcp_servers": [{"url": "http://localhost"}]}, "mcp_servers is not supported"),
]


def error_of(response: httpx.Response, status: int, kind: str) -> str:
    """Return the message of an error, after checking its form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"], set(body["error"])) == ("error", kind, {"type", "message"})
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert int(response.headers["content-length"]) == len(response.content)
    return str(body["error"]["message"])


async def post(desk: Desk, **fields: Any) -> httpx.Response:
    return await desk.stack.post("/v1/messages", **{"model": "toy", "max_tokens": 5, "messages": [USER], **fields})


async def test_bad_requests(desk: Desk) -> None:
    for fields, expected in BAD:
        for stream in (False, True):
            message = error_of(await post(desk, **fields, stream=stream), 400, "invalid_request_error")
            assert expected in message, fields
    assert desk.worker.calls == []


async def test_bad_bodies(desk: Desk) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for body in (b"", b"{", b"[]", b'{"messages": "x"}'):
            response = await desk.stack.http.post(path, content=body, headers={"content-type": "application/json"})
            error_of(response, 400, "invalid_request_error")


async def test_half_a_surrogate(desk: Desk) -> None:
    content = b'[{"type": "tool_use", "id": "a", "name": "f", "input": {"x": "\\ud800"}}]'
    body = b'{"messages": [{"role": "assistant", "content": ' + content + b'}, {"role": "user", "content": "x"}]}'
    headers = {"content-type": "application/json"}
    response = await desk.stack.http.post("/v1/messages/count_tokens", content=body, headers=headers)
    assert response.status_code in (200, 400), response.text


async def test_paths_methods_and_models(desk: Desk) -> None:
    http = desk.stack.http
    assert "no such path" in error_of(await http.post("/v1/messages/nothing"), 404, "not_found_error")
    assert "does not take GET" in error_of(await http.get("/v1/messages"), 405, "invalid_request_error")
    with pytest.raises(anthropic.NotFoundError, match="does not exist here; this server serves 'toy'"):
        await desk.ask(model="other")
    assert (await http.get("/v1/nothing")).json()["error"]["code"] is None  # OpenAI's form everywhere else


async def test_a_conversation_that_is_too_long(desk: Desk) -> None:
    desk.worker.script = b"x"
    longest = desk.worker.max_model_len
    prompt = [{"role": "user", "content": "x" * longest}]
    too_long = error_of(await post(desk, messages=prompt), 400, "invalid_request_error")
    assert too_long == f"prompt is too long: {longest + 2} tokens > {longest} maximum"
    enormous = [{"role": "user", "content": "x" * 100 * longest}]
    assert "prompt is too long: " in error_of(await post(desk, messages=enormous), 400, "invalid_request_error")
    together = error_of(await post(desk, max_tokens=longest), 400, "invalid_request_error")
    assert f"`max_tokens` exceed context limit: 4 + {longest} > {longest}" in together


async def test_no_room_and_no_worker(desk: Desk, start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0, queue_seconds=0.2)
    body = {"max_tokens": 5, "messages": [USER]}
    for stream in (False, True):
        response = await stack.post("/v1/messages", **body, stream=stream)
        error_of(response, 503, "overloaded_error")
        assert int(response.headers["retry-after"]) >= 1


async def test_a_worker_that_fails_amid_a_stream(desk: Desk) -> None:
    desk.answers("Good day.")
    desk.worker.fail_after, desk.worker.fail_code = 3, grpc.StatusCode.INVALID_ARGUMENT
    response = await post(desk, stream=True, seed=0)
    *_, last = response.text.strip().split("\n\n")
    name, _, data = last.partition("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"], error["error"]["type"]) == ("event: error", "error", "invalid_request_error")
    assert error["request_id"] == response.headers["request-id"]
    with pytest.raises(anthropic.APIStatusError, match="the toy was told to fail"):
        await desk.stream()


async def test_keys_and_large_bodies(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, api_key="one,two", max_body_bytes=1000)
    body = {"max_tokens": 2, "messages": [USER]}
    for headers in ({}, {"x-api-key": "three"}, {"authorization": "Bearer three"}, {"authorization": "one"}):
        response = await stack.http.post("/v1/messages", json=body, headers=headers)
        assert "x-api-key" in error_of(response, 401, "authentication_error")
    for headers in ({"x-api-key": "two"}, {"authorization": "Bearer one"}, {"x-api-key": "one", "authorization": "x"}):
        assert (await stack.http.post("/v1/messages", json=body, headers=headers)).status_code == 200
        assert (await stack.http.get("/v1/models", headers=headers)).status_code == 200
    large = {**body, "system": "x" * 1000}
    response = await stack.http.post("/v1/messages", json=large, headers={"x-api-key": "one"})
    error_of(response, 413, "request_too_large")


async def test_a_full_worker(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, queue_seconds=0.1)
    stack.workers["decode-0"].refusal = BusyError("this toy is full")
    body = {"max_tokens": 2, "messages": [USER]}
    error_of(await stack.post("/v1/messages", **body), 429, "rate_limit_error")
