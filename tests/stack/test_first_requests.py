"""What the first request of each kind costs others: all that is built at first use is built before a stack is ready."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serving.batches import make_lines, submit, wait_for
from tests.stack.processes import serve
from tests.stack.stacks import GEMMA, SMOLLM

pytestmark = [pytest.mark.model, pytest.mark.stack, pytest.mark.thorough]

MOST_SECONDS = 0.15
"""Longest time between two tokens of a running stream."""

_ASKED = [{"role": "user", "content": "Name a city."}]
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": _SCHEMA}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": _SCHEMA}}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "schema": ("/v1/completions", {"prompt": "A city:", "response_format": _FORMAT}),
    "regex": ("/v1/completions", {"prompt": "A number:", "guided_regex": r"\d{3}"}),
    "logprobs": ("/v1/completions", {"prompt": "x", "logprobs": 5}),
    "prompt logprobs": ("/v1/completions", {"prompt": "one two", "echo": True, "logprobs": 1, "max_tokens": 0}),
    "several choices": ("/v1/completions", {"prompt": "x", "n": 4, "temperature": 1}),
    "chat": ("/v1/chat/completions", {"messages": _ASKED}),
    "tools": ("/v1/chat/completions", {"messages": _ASKED, "tools": [_TOOL], "tool_choice": "required"}),
    "image": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [_IMAGE]}]}),
    "responses": ("/v1/responses", {"input": "Name a city.", "max_output_tokens": 16}),
    "message": ("/v1/messages", {"messages": _ASKED}),
    "score": ("/score", {"text_1": "a city", "text_2": "Rome"}),
    "tokenize": ("/tokenize", {"prompt": "Rome"}),
}


@pytest.mark.parametrize("model", [SMOLLM, GEMMA])
async def test_the_first_request_of_each_kind_stops_no_stream(
    model: str, tmp_path: Path, real_model: Callable[[str], Path]
) -> None:
    real_model(model)
    with serve(tmp_path / "log", model, "--kv-memory=512MiB") as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
            came: list[float] = []
            reading = asyncio.create_task(_read(http, came))
            while len(came) < 20:
                await asyncio.sleep(0.01)
            slowest: dict[str, float] = {}
            for kind, (path, body) in KINDS.items():
                begun = time.monotonic()
                answer = await http.post(path, json={"max_tokens": 16, "model": model, **body})
                assert answer.status_code in (200, 400), (kind, answer.text)
                await asyncio.sleep(0.3)  # what the request has begun may go on for a while
                slowest[kind] = _longest_gap(came, begun)
            begun = time.monotonic()
            await wait_for(http, await submit(http, make_lines(2, model, 8)))
            slowest["batch"] = _longest_gap(came, begun)
            assert not reading.done()
            reading.cancel()
    assert {kind: seconds for kind, seconds in slowest.items() if seconds > MOST_SECONDS} == {}


async def _read(http: httpx.AsyncClient, came: list[float]) -> None:
    """Read one long stream after the other, and note when each of their tokens comes."""
    body = {"prompt": "Count:", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    while True:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                    came.append(time.monotonic())


def _longest_gap(came: list[float], since: float) -> float:
    recent = [at for at in came if at >= since - 1]
    return max((after - before for before, after in itertools.pairwise(recent) if after > since), default=60.0)
