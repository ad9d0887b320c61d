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

from paceline.services.common.registry import Role
from tests.services.gateway.conftest import Stack, StartStack, eventually
from tests.services.gateway.planning.media.samples import data_url, image_file, picture
from tests.services.gateway.toy_calls import ADMISSION

LARGE = 500_000
"""Bytes above which an object counts. Each request below has more than that."""
TEXT = "word " * 200_000
WHOLE = 1 << 30
PICTURE = data_url(image_file(image=picture(64, 64)), "image/png")
GATEWAY = ("paceline.services.gateway", "uvicorn", "starlette", "fastapi", "pydantic")
BROKEN = data_url(bytes(range(256)) * 4000, "image/png")


@pytest.fixture
async def stack(start_stack: StartStack, media_model: Path) -> Stack:
    return await start_stack(model=str(media_model), store="none", queue_seconds=0.5)


@pytest.fixture
def garbage() -> Iterator[list[Any]]:
    """What only a collection would free, from the fixture on. Nothing is freed by collections meanwhile."""
    gc.disable()
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
    "a stream": (200, "/v1/completions", {"prompt": "x", "max_tokens": 4, "stream": True}),
    "a stream that is left": (200, "/v1/completions", {"prompt": "x", "max_tokens": 400, "stream": True}),
    "choices": (200, "/v1/chat/completions", chat({"type": "text", "text": "x"}, n=3, logprobs=True, stream=True)),
    "a stop string": (200, "/v1/completions", {"prompt": "x", "seed": 0, "max_tokens": 40, "stop": "quick"}),
    "an image": (200, "/v1/chat/completions", chat(image(PICTURE))),
    "scores": (200, "/v1/completions", {"prompt": "x y z", "max_tokens": 0, "echo": True, "logprobs": 1}),
    "the description of the API": (200, "/openapi.json", b""),
}
"""Status, path and body of requests."""
FAULTS: dict[str, tuple[Role, dict[str, Any]]] = {
    "a prefill worker refuses": ("prefill", {"fail_after": ADMISSION}),
    "a prefill worker fails": ("prefill", {"fail_after": 0}),
    "a decode worker refuses": ("decode", {"fail_after": ADMISSION}),
    "a decode worker fails": ("decode", {"fail_after": 3}),
    "the workers are full": ("decode", {"max_seqs": 0}),
}
"""Attributes of the toy workers of a role."""


async def test_nothing_large_waits_for_a_collection(stack: Stack, garbage: list[Any]) -> None:
    for name, (status, path, body) in REQUESTS.items():
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        assert await post(stack, path, content) == status, name  # the first request of a kind fills caches
        assert await left_by(stack, path, content, garbage) == [], name


@pytest.mark.parametrize("name", FAULTS)
async def test_nothing_of_a_failed_attempt_waits_for_a_collection(stack: Stack, garbage: list[Any], name: str) -> None:
    role, attributes = FAULTS[name]
    for worker in stack.workers.values():
        for attribute, value in attributes.items() if worker.role == role else ():
            setattr(worker, attribute, value)
    content = json.dumps({"prompt": "x", "max_tokens": 8, "n": 2}).encode()
    await post(stack, "/v1/completions", content)
    assert await left_by(stack, "/v1/completions", content, garbage) == []


async def left_by(stack: Stack, path: str, content: bytes, garbage: list[Any]) -> list[str]:
    """Return the objects of the gateway, and large contents, that only a collection frees after a request."""
    await eventually(stack.has_load(0))
    gc.set_debug(0)
    garbage.clear()
    gc.collect()  # frees what the requests before have left
    gc.set_debug(gc.DEBUG_SAVEALL)
    await post(stack, path, content, most=2000 if path != "/openapi.json" else WHOLE)
    await eventually(stack.has_load(0))
    gc.collect()
    own = {type(each).__name__ for each in garbage if type(each).__module__.startswith(GATEWAY)}
    return [*sorted(own), *large_contents(garbage)]


def large_contents(garbage: list[Any]) -> list[str]:
    return [
        f"{type(each).__name__} {getattr(getattr(each, 'f_code', None), 'co_qualname', '')} has {len(own)}"
        for each in garbage
        for own in gc.get_referents(each)
        if isinstance(own, bytes | bytearray | str) and len(own) > LARGE
    ]


async def post(stack: Stack, path: str, content: bytes, most: int = WHOLE) -> int:
    """Send a request, and return the status of the answer. Usual clients leave cycles of their own.

    Args:
        most: bytes of the answer after which the client leaves.
    """
    method = "POST" if content else "GET"
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    answer = b""
    while len(answer) < most and (part := await reader.read(most - len(answer))):
        answer += part
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1])
