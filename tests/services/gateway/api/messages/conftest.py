from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.services.gateway.conftest import PATIENCE, Stack, StartStack, eventually
from tests.services.gateway.toy_model import AGENT_TEMPLATE, text_of, write_toy_model


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
        return text_of(self.worker.calls[-1].work.token_ids)

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
    return write_toy_model(tmp_path_factory.mktemp("models") / "toy", chat_template=AGENT_TEMPLATE)


@pytest.fixture
async def desk(start_stack: StartStack, agent_model: Path) -> AsyncIterator[Desk]:
    stack = await start_stack(prefill=0, decode=0, model=str(agent_model))
    await stack.add("decode", "d", max_model_len=20_000)
    await eventually(stack._is_healthy)
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield Desk(stack, client)
