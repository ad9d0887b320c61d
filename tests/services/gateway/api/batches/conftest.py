"""Gateways as in production with toy workers, and the `openai` SDK as their client."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai.types import Batch

from tests.services.gateway.conftest import Stack, StartStack, eventually

StartBatches = Callable[..., Awaitable[Stack]]
Json = dict[str, Any]


@pytest.fixture
def start_batches(start_stack: StartStack, tmp_path: Path) -> StartBatches:
    """Return a function that starts stacks, all with the same store."""

    async def start(**options: Any) -> Stack:
        return await start_stack(**{"store": str(tmp_path / "store.db"), **options})

    return start


def line(name: str, *, url: str = "/v1/completions", **body: Any) -> Json:
    """Return a request for an input file."""
    whole = {"model": "toy", "prompt": name, "seed": 0, "max_tokens": 4, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": whole}


async def submit(stack: Stack, lines: Sequence[Json | str], **options: Any) -> Batch:
    """Upload lines and start a batch of them."""
    texts = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    content = "".join(f"{text}\n" for text in texts).encode()
    file = await stack.openai.files.create(file=("in.jsonl", content), purpose="batch")
    fields: Any = {"endpoint": "/v1/completions", "completion_window": "24h", **options}
    return await stack.openai.batches.create(input_file_id=file.id, **fields)


async def ended(stack: Stack, batch_id: str) -> Batch:
    """Wait until a batch has ended, and return it."""
    found: list[Batch] = []

    async def has_ended() -> bool:
        found[:] = [await stack.openai.batches.retrieve(batch_id)]
        return found[0].status in ("completed", "failed", "expired", "cancelled")

    await eventually(has_ended)
    return found[0]


async def content(stack: Stack, file_id: str | None) -> dict[str, Json]:
    """Return the lines of a file of answers by custom_id. There must not be two of one id."""
    if file_id is None:
        return {}
    text = (await stack.openai.files.content(file_id)).text
    lines = [json.loads(each) for each in text.splitlines()]
    by_id = {each["custom_id"]: each for each in lines}
    assert len(by_id) == len(lines)
    return by_id
