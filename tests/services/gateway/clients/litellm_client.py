"""What a program does with LiteLLM. It runs in an environment of LiteLLM's own, and prints one JSON object at its end.

usage: litellm_client.py URL CONTEXT
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "See its name.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


class Client:
    """Requests of one provider's kind to one server."""

    def __init__(self, url: str, provider: str, stream: bool) -> None:
        base = url if provider == "anthropic" else f"{url}/v1"
        # Without max_tokens, the provider anthropic asks for more than the context holds.
        self._common = {"api_base": base, "api_key": "none", "max_retries": 0, "timeout": 60, "max_tokens": 400}
        self._provider = provider
        self._stream = stream

    async def ask(self, messages: list[Any], model: str = "toy", **fields: Any) -> Any:
        request = {"model": f"{self._provider}/{model}", "messages": messages, "stream": self._stream}
        if self._stream:
            request["stream_options"] = {"include_usage": True}
        answer = await litellm.acompletion(**request, **self._common, **fields)
        if not self._stream:
            return answer
        return litellm.stream_chunk_builder([chunk async for chunk in answer], messages=messages)

    async def use_tools(self) -> dict[str, Any]:
        """Return the calls and the last answer of a conversation with tools."""
        messages: list[Any] = [{"role": "user", "content": "How is it?"}]
        called = []
        while True:
            answer = await self.ask(messages, tools=TOOLS)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                usage, end = answer.usage, answer.choices[0].finish_reason
                assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0
                return {"calls": called, "text": message.content, "end": end}
            assert answer.choices[0].finish_reason == "tool_calls"
            for call in message.tool_calls:
                called.append([call.function.name, json.loads(call.function.arguments)])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "noon"})

    async def report(self) -> Any:
        schema = {"name": "report", "schema": SCHEMA, "strict": True}
        messages = [{"role": "user", "content": "Report"}]
        answer = await self.ask(messages, response_format={"type": "json_schema", "json_schema": schema})
        return json.loads(answer.choices[0].message.content)

    async def think(self) -> list[str]:
        message = (await self.ask([{"role": "user", "content": "Think"}])).choices[0].message
        return [message.reasoning_content, message.content]

    async def errors(self, context: int) -> list[str]:
        """Return the names of the exceptions for a long prompt, an unknown model and a wrong value."""
        attempts = (
            ("x" * context, {}),
            ("x", {"model": "other"}),
            ("x", {"temperature": 3}),
        )
        names = []
        for text, fields in attempts:
            try:
                await self.ask([{"role": "user", "content": text}], **fields)
            except litellm.exceptions.APIError as error:
                names.append(f"APIError {error}")
            except Exception as error:
                names.append(type(error).__name__)
        return names


async def respond(url: str, stream: bool) -> list[Any]:
    """Return what a response with a call and the response after it hold."""
    common = {"model": "openai/toy", "api_base": f"{url}/v1", "api_key": "none", "stream": stream}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]

    async def ask(**fields: Any) -> Any:
        answer = await litellm.aresponses(**common, **fields)
        if not stream:
            return answer
        events = [event async for event in answer]
        return next(event.response for event in events if event.type == "response.completed")

    first = await ask(input="How is it?", tools=tools)
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"} for call in calls]
    again = await ask(input=outputs, tools=tools, previous_response_id=first.id)
    return [[call.name for call in calls], [item.type for item in again.output]]


async def main(url: str, context: int) -> dict[str, Any]:
    done: dict[str, Any] = {}
    for stream in (False, True):
        way = "stream" if stream else "whole"
        for provider in ("openai", "hosted_vllm", "anthropic"):
            client = Client(url, provider, stream)
            done[f"{provider} {way}"] = {
                "tools": await client.use_tools(),
                "report": await client.report(),
                "thought": await client.think(),
                "errors": await client.errors(context),
            }
        done[f"response {way}"] = await respond(url, stream)
    return done


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2])))))
