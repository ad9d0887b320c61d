"""A small real model calls tools, with speculative decoding."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

from bench.serving.tools import Asker, complaint, make_chat, random_tools
from tests.stack.processes import Stack
from tests.stack.stacks import SMOLLM as MODEL
from tests.stack.stacks import on

pytestmark = [pytest.mark.model, pytest.mark.stack, on("float32")]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def turn(city: str, weather: str) -> list[dict[str, Any]]:
    """Return the messages of a question that was answered with a call."""
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return [
        {"role": "user", "content": f"What is the weather in {city} right now?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": city, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": city, "content": weather},
        {"role": "assistant", "content": f"It is {weather} in {city}."},
    ]


async def test_calls_of_random_tools_are_valid(stack: Stack) -> None:
    rng = random.Random(1)
    sets = [random_tools(rng) for _ in range(4)]
    async with httpx.AsyncClient(base_url=stack.url, timeout=300) as client:
        chats = [make_chat(rng, tools, 160) for tools in sets]
        answers, _ = await Asker(client, MODEL, 8, 1).ask("/v1/chat/completions", chats)
    assert [text for tools, answer in zip(sets, answers) if (text := complaint(tools, answer))] == []
    assert sum(answer.finish_reason == "tool_calls" for answer in answers) >= 2
    await stack.settled()


async def test_the_model_calls_a_tool_by_itself(stack: Stack) -> None:
    """The smallest SmolLM2 calls tools only if the conversation shows it how."""
    messages = [*turn("Rome", "sunny"), *turn("Oslo", "cloudy"), turn("Paris", "")[0]]
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        body = {"messages": messages, "tools": [WEATHER], "max_tokens": 60, "temperature": 0}
        (choice,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
