"""HTTP as uvicorn speaks it, with an end to heads: how large they may be, and how long they may take.

uvicorn bounds neither with this parser, so that one connection could fill the memory, and many stay open for ever,
before any of our code sees a request. Bodies are bounded by BodyLimitMiddleware.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.core.telemetry import request_span, set_request_id
from paceline.services.gateway.errors import ApiError, to_api_error

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers."""
HEAD_SECONDS = 30.0


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._end_head()
            self.send_400_response(f"The head of the request is larger than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _begin_head(self) -> None:
        self._end_head()
        self._in_head, self._head_bytes = True, 0
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _end_head(self) -> None:
        self._in_head = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.close()


BODY_SECONDS = 60.0

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ID_PREFIXES = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
_PROTECTED = ("/v1/", "/tokenize", "/detokenize", "/fleet", "/trace")


def is_valid_id(text: str) -> bool:
    """Whether a client's request id is fit for logs, headers and keys: up to 128 visible ASCII characters."""
    return _ID.fullmatch(text) is not None


class RequestIdMiddleware:
    """Takes the id from X-Request-Id or makes one, as `request.state.request_id` and in log lines, and answers with it,
    also where nobody foresaw an error. `request.state.arrived` is when the head came, on time.monotonic(), and
    `request.state.send` is how the server itself is told of a body whose head has gone the usual way.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["arrived"], state["send"] = time.monotonic(), send
        state["client_chose_id"] = is_valid_id(given)
        own = _ID_PREFIXES.get(scope["path"], "req-") + uuid.uuid4().hex
        state["request_id"] = given if state["client_chose_id"] else own
        # The server starts a task for each request, so that nothing has to be taken back.
        set_request_id(state["request_id"])
        begun = False
        # One trace for everything that the client asked for, and none for probes.
        span: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if scope["path"] in _ID_PREFIXES:
            span = request_span("http", state["request_id"], Headers(scope=scope))

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        try:
            with span:
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            answer = to_api_error(error)
            # Returning without an end makes the server close the connection.
            if not begun:
                await answer.response()(scope, receive, send_with_id)


class BodyLimitMiddleware:
    """Refuses bodies of more than `max_bytes`, announced or not, with 413, and those that take too long with 408."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"the body is larger than {self._max_bytes} bytes, the --max-body-bytes of the gateway"
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced) > self._max_bytes:
            await ApiError(413, message).response()(scope, receive, send)
            return
        received, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._max_seconds

        async def limited_receive() -> Message:
            nonlocal received, complete
            try:
                # Behind the body comes the client's leave, which may take as long as it likes.
                async with asyncio.timeout_at(None if complete else deadline):
                    event = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {self._max_seconds:g} seconds") from None
            received += len(event.get("body", b""))
            complete = not event.get("more_body", False)
            if received > self._max_bytes:
                raise HTTPException(413, message)
            return event

        await self._app(scope, limited_receive, send)


class ApiKeyMiddleware:
    """Asks for one of `keys` where the API is used; probes and metrics stay open."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_PROTECTED):
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip())
        # All keys are compared, and digests of equal length, so that the time taken tells nothing.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() == "bearer" and any(matches):
            await self._app(scope, receive, send)
            return
        message = "a valid API key is needed: send the header Authorization: Bearer KEY"
        await ApiError(401, message, code="invalid_api_key").response()(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
