"""HTTP limits and the middlewares for request ids and body sizes.

With this parser uvicorn limits neither the size of a request's head nor the time that it takes. One connection could
fill the memory, and many could stay open for ever, before our code sees a request. BoundedHttp limits heads;
BodyLimitMiddleware limits bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.core.telemetry import request_span, set_request_id
from paceline.services.gateway.errors import ApiError, is_messages_path, to_api_error

MAX_HEAD_BYTES = 64 << 10
"""Largest size of a request line and its headers together."""
HEAD_SECONDS = 30.0
"""Longest time for a head to arrive. An idle kept-alive connection is uvicorn's to close."""
TOO_LARGE = f"The head of the request is larger than {MAX_HEAD_BYTES} bytes."


class BoundedHttp(HttpToolsProtocol):
    """One connection, whose request heads are limited in size and time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = False
        self._head_bytes = 0
        self._chunk_bytes = 0
        """Bytes of the chunk that is being parsed; 0 after another request has ended in it."""
        self._refusal = ""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._chunk_bytes = len(data)
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._end_head()
            self.send_400_response(TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self._refusal or msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        # A head that comes at once is over when its chunk has been parsed, so it is measured here.
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refusal = TOO_LARGE
            raise ValueError(TOO_LARGE)  # the parser stops, and uvicorn answers
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._chunk_bytes = 0
        super().on_message_complete()

    def _begin_head(self) -> None:
        self._end_head()
        self._in_head, self._head_bytes = True, self._chunk_bytes
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
UPLOAD_PATH = "/v1/files"
UPLOAD_SECONDS = 1800.0
"""Longest time for the body of a file to arrive."""
FORM_BYTES = 64 << 10
"""Bytes that the body of an upload may have beside its file."""

_ID = re.compile(r"[\x21-\x7e]{1,128}")
ID_PREFIXES = {
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
    "/v1/chat/completions/batch": "chatcmpl-",
    "/v1/messages": "msg_",
    "/v1/responses": "resp_",
    "/inference/v1/generate": "gen-",
    "/score": "score-",
    "/v1/score": "score-",
    "/rerank": "rerank-",
    "/v1/rerank": "rerank-",
    "/v2/rerank": "rerank-",
}
"""The routes whose answers workers compute, and the beginning of their requests' ids."""


def is_valid_id(text: str) -> bool:
    """Return whether a client's request id is safe in logs, headers and keys: 1 to 128 visible ASCII characters."""
    return _ID.fullmatch(text) is not None


class RequestIdMiddleware:
    """Middleware that gives each request an id: the client's X-Request-Id if it is valid, else a new one.

    The id is in `request.state.request_id`, in log lines and in every response, even after an unexpected error.
    `request.state.arrived` is when the head came, on time.monotonic(). `request.state.send` is the server's own `send`,
    which may send a body after its head has passed the middlewares. `request.state.headers` are added to those of the
    answer. `request.state.resources` is closed when the request ends, or before, when its generation runs.
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
        state["client_chose_id"], state["headers"] = is_valid_id(given), {}
        own = ID_PREFIXES.get(scope["path"], "req-") + uuid.uuid4().hex
        state["request_id"] = given if state["client_chose_id"] else own
        # The server runs each request in a task of its own, so the id need not be reset.
        set_request_id(state["request_id"])
        begun = False
        # Only generation requests get a trace; probes get none.
        span: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if scope["path"] in ID_PREFIXES:
            span = request_span("http", state["request_id"], Headers(scope=scope))

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = state["request_id"]
                headers.update(state["headers"])
                if is_messages_path(scope["path"]):
                    headers["request-id"] = state["request_id"]
            await send(message)

        try:
            with span, contextlib.ExitStack() as state["resources"]:
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            answer = to_api_error(error)
            # If the response has begun, return without ending it: then the server closes the connection.
            if not begun:
                await answer.response()(scope, receive, send_with_id)


class BodyLimitMiddleware:
    """Middleware that refuses bodies of more than `max_bytes` with 413, and bodies slower than `max_seconds` with 408.

    The size is checked in Content-Length and again while the body arrives.

    Args:
        max_upload_bytes: largest file that may be uploaded. Uploads have limits of their own, because the gateway does
            not keep them in memory.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, max_seconds: float = BODY_SECONDS, max_upload_bytes: int = 0
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most, seconds = self._max_bytes, self._max_seconds
        message = f"the body is larger than {most} bytes, the --max-body-bytes of the gateway"
        if scope["path"] == UPLOAD_PATH:
            most, seconds = self._max_upload_bytes + FORM_BYTES, UPLOAD_SECONDS
            message = f"the file is larger than {self._max_upload_bytes} bytes, the --max-file-size of the gateway"
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced) > most:
            await ApiError(413, message).response()(scope, receive, send)
            return
        received, complete = 0, False
        deadline = asyncio.get_running_loop().time() + seconds

        async def limited_receive() -> Message:
            nonlocal received, complete
            try:
                # After the body, the next event is the client's disconnect, which has no deadline.
                async with asyncio.timeout_at(None if complete else deadline):
                    event = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {seconds:g} seconds") from None
            received += len(event.get("body", b""))
            complete = not event.get("more_body", False)
            if received > most:
                raise HTTPException(413, message)
            return event

        await self._app(scope, limited_receive, send)
