from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.services.gateway.conftest import PATIENCE, Stack, StartStack, eventually
from tests.services.gateway.toy_model import write_toy_model

TEMPLATE = """
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
    {%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""
"""A chat template with tools in the form of Hermes, and with reasoning."""


class Desk:
    """A gateway whose worker writes what a test tells it to, and Anthropic's own client."""

    def __init__(self, stack: Stack, client: anthropic.AsyncAnthropic) -> None:
        self.stack = stack
        self.client = client
        self.worker = stack.workers["d"]

    def answers(self, text: str) -> None:
        """Choose the text of the next answers."""
        self.worker.script = text.encode()
        self.worker.stop_at = len(self.worker.script)

    @property
    def prompt(self) -> str:
        """The prompt that the worker got last."""
        marks = {256: "<|end|>", 257: "<|user|>", 258: "<|assistant|>"}
        pieces = [marks[i].encode() if i in marks else bytes([i]) for i in self.worker.calls[-1].work.token_ids]
        return b"".join(pieces).decode()

    @property
    def constraint(self) -> str:
        """The constraint of the last answer; "" if there was none."""
        return self.worker.calls[-1].work.sampling.constraint.text

    async def ask(self, **fields: Any) -> anthropic.types.Message:
        return await self.client.messages.create(**with_defaults(fields))

    async def stream(self, **fields: Any) -> anthropic.types.Message:
        """Return the same answer as `ask`, from a stream."""
        async with self.client.messages.stream(**with_defaults(fields)) as events:
            return await events.get_final_message()


def with_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request, with those that every test needs. Fields without a type in the client are extra.

    A toy worker begins its text at the seed.
    """
    extra = {name: fields.pop(name) for name in ("temperature", "top_p", "top_k") if name in fields}
    asked = {"model": "toy", "max_tokens": 400, "messages": [{"role": "user", "content": "hello"}], **fields}
    return {**asked, "extra_body": {"seed": 0, **extra}}


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("models") / "toy", chat_template=TEMPLATE)


@pytest.fixture
async def desk(start_stack: StartStack, agent_model: Path) -> AsyncIterator[Desk]:
    stack = await start_stack(prefill=0, decode=0, model=str(agent_model))
    await stack.add("decode", "d", max_model_len=20_000)
    await eventually(stack._is_healthy)
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield Desk(stack, client)
