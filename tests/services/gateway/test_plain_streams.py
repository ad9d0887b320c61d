"""What a client sees of a stream if it asks for nothing of Paceline's own, read as naive clients read it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import GatewayConfig
from paceline.services.gateway.app import create_app
from paceline.services.gateway.gateway import Gateway, load_models
from tests.services.gateway.conftest import Stack, StartStack, eventually

Json = dict[str, Any]

MESSAGES = [{"role": "user", "content": "hi"}]
STREAMS: list[tuple[str, Json]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 8, "n": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, "stream_options": {"include_usage": True}}),
    ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"max_tokens": 8}}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 8}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 8}),
]
NAMED = ("/v1/messages", "/v1/responses")
"""Routes whose events have names in the API that they come from, which are the types in their data."""
# A mesh adds the first header to each request, vLLM's benchmark client does it itself.
HEADERS = [{"X-Request-Id": "5f0c-1"}, {}]


def naive_events(path: str, text: str) -> list[Json]:
    """Return the data of events as a client reads it that knows nothing of server-sent events but their prefix.

    It splits a stream at blank lines, takes "data: " off, and parses the rest.
    """
    *parts, rest = text.split("\n\n")
    assert rest == ""
    events = []
    for part in parts:
        name = ""
        if path in NAMED:
            name, part = part.removeprefix("event: ").split("\n", 1)
        assert part.startswith("data: "), part
        if part != "data: [DONE]":
            events.append(json.loads(part.removeprefix("data: ")))
            assert not name or events[-1]["type"] == name
    return events


@pytest.mark.parametrize("headers", HEADERS)
async def test_naive_clients_can_read_all_streams(stack: Stack, headers: dict[str, str]) -> None:
    for path, body in STREAMS:
        answer = await stack.http.post(path, json={**body, "stream": True}, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert len(naive_events(path, answer.text)) > 2


async def test_naive_clients_can_read_the_end_of_a_gateway(start_stack: StartStack) -> None:
    """Clients that ask for ids are also told when to come back."""
    stack = await start_stack(drain_seconds=0.2)
    stack.pause_decode(after=3)
    headers = HEADERS[0]
    asked = [stack.http.post(path, json={**body, "stream": True}, headers=headers) for path, body in STREAMS]
    answers = asyncio.gather(*asked)
    await eventually(lambda: len(stack.workers["decode-0"].calls) > len(STREAMS))  # one of them has two choices
    stack.stop.set()
    for (path, _), answer in zip(STREAMS, await answers, strict=True):
        assert "shutting down" in json.dumps(naive_events(path, answer.text)[-1])


def test_all_streams_are_tried(toy_model: Path) -> None:
    config = GatewayConfig(model=str(toy_model))
    paths = create_app(Gateway(config, load_models(config))).openapi()["paths"]
    streamed = {path for path, each in paths.items() if "text/event-stream" in json.dumps(each.get("post", {}))}
    assert streamed == {path for path, _ in STREAMS}
