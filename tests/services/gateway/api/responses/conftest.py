from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response

from tests.services.gateway.conftest import Stack, StartStack, eventually
from tests.services.gateway.toy_model import text_of

CONTEXT = 1 << 13
SEED = {"seed": 0}

StartAgents = Callable[..., Awaitable[Stack]]


@pytest.fixture
def start_agents(start_stack: StartStack, tmp_path: Path) -> StartAgents:
    """Return a function that starts stacks that know tools and reasoning, and have room for long prompts."""

    async def start(**options: Any) -> Stack:
        settings = {"store": str(tmp_path / "responses.db"), "tool_call_parser": "hermes"}
        stack = await start_stack(**{**settings, "reasoning_parser": "think", **options})
        for worker in stack.workers.values():
            worker.max_model_len = CONTEXT
            assert worker._registrar is not None
            worker._registrar.announce()

        async def has_room() -> bool:
            return bool((await stack.http.get("/v1/models")).json()["data"][0]["max_model_len"] == CONTEXT)

        await eventually(has_room)
        return stack

    return start


@pytest.fixture
async def agents(start_agents: StartAgents) -> Stack:
    return await start_agents()


def recite(stack: Stack, text: str, ends: bool = True) -> None:
    """Make the model answer with a text, if the seed is 0."""
    for worker in stack.workers.values():
        worker.script = text.encode()
        worker.stop_at = len(worker.script) if ends else None


def prompt_of(stack: Stack) -> str:
    """Return the text that the model saw last."""
    return text_of(stack.workers["prefill-0"].calls[-1].work.token_ids)


def call(name: str, **arguments: Any) -> str:
    """Return a tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


async def ask(stack: Stack, prompt: str, answer: str, **options: Any) -> Response:
    """Send a request with a text, which the model answers with `answer`."""
    recite(stack, answer)
    extra = {**SEED, **options.pop("extra_body", {})}
    return await stack.openai.responses.create(model="toy", input=prompt, extra_body=extra, **options)
