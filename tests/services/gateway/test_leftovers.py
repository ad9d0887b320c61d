"""What a request leaves in the gateway's memory. Full garbage collections are rare while others run, so large contents
of requests must not be part of reference cycles, which errors with tracebacks easily make.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.conftest import Stack, StartStack
from tests.services.gateway.media.samples import data_url

LARGE = 500_000
"""Bytes above which an object counts. Each request below has more than that."""
TEXT = "word " * 200_000
BROKEN = data_url(bytes(range(256)) * 4000, "image/png")


@pytest.fixture
async def stack(start_stack: StartStack, media_model: Path) -> Stack:
    return await start_stack(model=str(media_model), store="none")


@pytest.fixture
def garbage() -> Iterator[list[Any]]:
    """What only a collection would free, from the fixture on. Nothing is freed by collections meanwhile."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def chat(*content: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 1, **more}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


REQUESTS: dict[str, tuple[int, str, dict[str, Any] | bytes]] = {
    "a broken image": (400, "/v1/chat/completions", chat(image(BROKEN))),
    "no JSON": (400, "/v1/completions", b'{"prompt": "' + TEXT.encode()),
    "an invalid field": (400, "/v1/completions", {"prompt": TEXT, "max_tokens": -1}),
    "a long prompt": (400, "/v1/completions", {"prompt": TEXT}),
    "a long chat": (400, "/v1/chat/completions", chat({"type": "text", "text": TEXT})),
    "a long message": (400, "/v1/messages", chat({"type": "text", "text": TEXT})),
    "a long response": (400, "/v1/responses", {"input": TEXT}),
    "an unknown model": (404, "/v1/completions", {"prompt": TEXT, "model": "other"}),
    "a served request": (200, "/v1/completions", {"prompt": "x", "max_tokens": 1, "user": TEXT}),
}
"""Status, path and body of requests."""


async def test_nothing_large_waits_for_a_collection(stack: Stack, garbage: list[Any]) -> None:
    for name, (status, path, body) in REQUESTS.items():
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        assert await post(stack, path, content) == status, name  # the first request of a kind fills caches
        gc.collect()
        garbage.clear()
        await post(stack, path, content)
        gc.collect()
        assert large_contents(garbage) == [], name


def large_contents(garbage: list[Any]) -> list[str]:
    return [
        f"{type(each).__name__} {getattr(getattr(each, 'f_code', None), 'co_qualname', '')} has {len(own)}"
        for each in garbage
        for own in gc.get_referents(each)
        if isinstance(own, bytes | bytearray | str) and len(own) > LARGE
    ]


async def post(stack: Stack, path: str, content: bytes) -> int:
    """Send a request, and return the status of the answer. Usual clients leave cycles of their own."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1])
