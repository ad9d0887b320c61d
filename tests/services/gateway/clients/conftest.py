"""A gateway with tools and reasoning, whose worker plays a model in scripted conversations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.services.gateway.conftest import PATIENCE, Stack, StartStack, eventually
from tests.services.gateway.toy_model import AGENT_TEMPLATE, text_of, write_toy_model

CONTEXT = 20_000

Scripts = Mapping[str, Sequence[str]]
"""The answers of a conversation, by a text that only its prompts have."""


def call(name: str, **arguments: Any) -> str:
    """Return a tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


class Playhouse:
    """A gateway and its worker, which knows conversations by heart."""

    def __init__(self, stack: Stack) -> None:
        self.url = stack.url
        self.http = stack.http
        self._worker = stack.workers["d"]

    def play(self, scripts: Scripts) -> None:
        """Choose the conversations: the n-th answer follows a prompt with n - 1 answers."""

        def answer(prompt: str) -> str:
            (script,) = (script for text, script in scripts.items() if text in prompt)
            return script[prompt.count("<|assistant|>") - 1]

        self._worker.answer = answer

    @property
    def prompts(self) -> list[str]:
        """All prompts that the worker has got."""
        return [text_of(call.work.token_ids) for call in self._worker.calls]

    @property
    def constraint(self) -> str:
        """The constraint of the last answer; "" if there was none."""
        return self._worker.calls[-1].work.sampling.constraint.text


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("models") / "toy", chat_template=AGENT_TEMPLATE)


@pytest.fixture
async def playhouse(start_stack: StartStack, agent_model: Path, tmp_path: Path) -> Playhouse:
    store = str(tmp_path / "responses.db")
    stack = await start_stack(prefill=0, decode=0, model=str(agent_model), store=store)
    await stack.add("decode", "d", max_model_len=CONTEXT)
    await eventually(stack._is_healthy)
    return Playhouse(stack)


@pytest.fixture
async def client(playhouse: Playhouse) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{playhouse.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client
