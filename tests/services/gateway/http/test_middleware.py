"""A request's id in its response and in all of its log lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.config.http import HttpOptions
from paceline.core.telemetry import _add_context
from paceline.services.gateway.http.bounds import BodyMemory, Bounds
from paceline.services.gateway.http.event_streams import EventStreamResponse
from paceline.services.gateway.http.fair_pool import FairPool
from paceline.services.gateway.http.middleware import RequestScopeMiddleware
from tests.services.gateway.conftest import Stack, StartStack


class Lines(logging.Handler):
    """A log handler that keeps each message with the request id that the JSON form shows."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(_add_context)
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((vars(record)["request_id"], record.getMessage()))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    handler = Lines()
    logger = logging.getLogger("paceline.services.gateway")
    logger.addHandler(handler)
    with caplog.at_level(logging.INFO, logger.name):
        yield handler
    logger.removeHandler(handler)


async def test_refusals_and_warnings_carry_the_id(start_stack: StartStack, lines: Lines) -> None:
    stack = await start_stack(max_body_bytes=1000, api_key="key")

    async def post(request_id: str, body: Any, key: str = "key") -> int:
        headers = {"x-request-id": request_id, "authorization": f"Bearer {key}"}
        return (await stack.http.post("/v1/completions", json=body, headers=headers)).status_code

    lines.seen.clear()
    assert await post("unknown-field", {"prompt": "x", "max_tokens": 1, "made_up": 1}) == 200
    assert await post("wrong-field", {"prompt": "x", "max_tokens": "1"}) == 400
    assert await post("wrong-model", {"prompt": "x", "model": "m"}) == 404
    assert await post("too-long", {"prompt": "x" * 900}) == 400
    assert await post("too-large", {"prompt": "x" * 1000}) == 413
    assert await post("wrong-key", {"prompt": "x"}, "other") == 401
    ids = [request_id.rsplit("-", 1)[0] if request_id.count("-") == 2 else request_id for request_id, _ in lines.seen]
    assert ids == ["unknown-field", "unknown-field", "wrong-field", "wrong-model", "too-long", "too-large", "wrong-key"]
    assert "made_up" in lines.seen[0][1]
    assert lines.seen[2][1].startswith("answered 400: 'max_tokens")


async def test_an_id_in_the_body_is_that_of_the_log(stack: Stack, lines: Lines) -> None:
    lines.seen.clear()
    await stack.post("/v1/completions", prompt="x" * 600, request_id="from-the-body")
    assert [request_id for request_id, _ in lines.seen] == ["from-the-body"]


def in_scopes(app: ASGIApp) -> RequestScopeMiddleware:
    return RequestScopeMiddleware(app, FairPool(1), Bounds.of(HttpOptions()), BodyMemory(1 << 20))


async def ask(app: ASGIApp) -> httpx.Response:
    transport = httpx.ASGITransport(in_scopes(app), raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get("/", headers={"x-request-id": "mine"})


async def test_what_nobody_foresaw_is_answered_and_logged(lines: Lines) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("secret")

    response = await ask(broken)
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    assert "secret" not in response.text
    assert {request_id for request_id, _ in lines.seen} == {"mine"}
    assert "unexpected error" in lines.seen[0][1]


async def test_a_stalled_client_is_told_by_its_id(lines: Lines) -> None:
    async def events() -> AsyncGenerator[bytes]:
        yield b"data: x\n\n"

    async def silence(*_: Any) -> Any:
        await asyncio.Event().wait()

    app = in_scopes(EventStreamResponse(events(), lambda error: b"", send_seconds=0.01))
    scope = {"type": "http", "path": "/", "headers": [(b"x-request-id", b"mine")]}
    await asyncio.create_task(app(scope, silence, silence))
    assert lines.seen == [("mine", "a client took nothing for 0.01 seconds; its request was cancelled")]
