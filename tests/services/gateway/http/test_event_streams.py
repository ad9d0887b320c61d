"""Clients that stop reading or writing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from paceline.services.gateway.http.bodies import BodyMiddleware
from paceline.services.gateway.http.errors import ClientLeftError
from paceline.services.gateway.http.event_streams import EventStreamResponse, until_disconnect
from paceline.services.gateway.http.request_scope import set_scope
from tests.services.gateway.toy_scope import toy_scope


def scope() -> Scope:
    scope: Scope = {"type": "http", "path": "/", "headers": []}
    set_scope(scope, toy_scope())
    return scope


async def silence(*_: Any) -> Any:
    await asyncio.Event().wait()


class Events:
    """An endless stream of events that records whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    async def run(self) -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            self.closed = True


async def test_a_client_that_takes_nothing_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    events, sent = Events(), []

    async def send_headers_only(message: Message) -> None:
        if message["type"] == "http.response.body":
            await silence()
        sent.append(message["type"])

    await EventStreamResponse(events.run(), lambda error: b"", send_seconds=0.01)(scope(), silence, send_headers_only)
    assert events.closed
    assert sent == ["http.response.start"]
    assert "took nothing" in caplog.text


async def test_a_body_that_does_not_come_is_given_up() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    with pytest.raises(HTTPException) as caught:
        await BodyMiddleware(app, 100, max_seconds=0.01)(scope(), silence, silence)
    assert caught.value.status_code == 408


async def test_behind_the_body_there_is_no_limit() -> None:
    messages: list[Message] = [{"type": "http.request", "body": b"x", "more_body": False}, {"type": "http.disconnect"}]
    seen: list[str] = []

    async def receive() -> Message:
        await asyncio.sleep(0.02 * len(seen))
        return messages[len(seen)]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in messages:
            seen.append((await receive())["type"])

    await BodyMiddleware(app, 100, max_seconds=0.01)(scope(), receive, silence)
    assert seen == ["http.request", "http.disconnect"]


async def test_work_ends_before_its_caller_goes_on() -> None:
    ended = asyncio.Event()

    async def work() -> str:
        try:
            return await silence()
        finally:
            await asyncio.sleep(0)
            ended.set()

    async def leave() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientLeftError):
        await until_disconnect(leave, work())
    assert ended.is_set()


async def test_the_result_comes_back_while_the_client_is_there() -> None:
    async def work() -> str:
        return "done"

    assert await until_disconnect(silence, work()) == "done"
