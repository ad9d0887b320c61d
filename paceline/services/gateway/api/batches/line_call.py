"""One line of a batch as a request to the application, which treats it as it treats a client's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message

from paceline.services.gateway.api.batches.lines import Line, LineReply
from paceline.services.gateway.http.access.callers import Caller
from paceline.services.gateway.http.middleware import LINE_CALLER
from paceline.services.gateway.http.request_scope import scope_of


async def call(app: ASGIApp, endpoint: str, line: Line, caller: Caller) -> LineReply:
    """Return the application's answer to a line. Cancelling the call ends the request.

    Args:
        caller: who made the batch. Limits of the key hold; the key itself is not needed.
    """
    if line.body.get("stream"):
        return LineReply(400, "", {"error": {"message": "stream: a batch has no streams; leave it out"}})
    # On a thread, because a line may be as large as a body.
    body = await asyncio.to_thread(lambda: json.dumps(line.body).encode())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": endpoint,
        "raw_path": endpoint.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        LINE_CALLER: caller,
    }
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    started: list[Message] = []
    content: list[bytes] = []

    async def receive() -> Message:
        if not requests:
            await asyncio.Event().wait()  # nobody disconnects
        return requests.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.append(message)
        else:
            content.append(message.get("body", b""))

    await app(scope, receive, send)
    (start,) = started
    names = {bytes(name).lower(): bytes(value).decode("latin-1") for name, value in start["headers"]}
    told = await asyncio.to_thread(json.loads, b"".join(content) or b"null")
    seconds, error_type = float(names.get(b"retry-after", 0)), scope_of(scope).error_type
    return LineReply(start["status"], names.get(b"x-request-id", ""), told, seconds, error_type)
