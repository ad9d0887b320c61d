"""Answers that end when the client disconnects: server-sent events, and other work, which is then cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.services.common.tasks import StallWatch, end_tasks
from paceline.services.gateway.http.error_responses import logged_response
from paceline.services.gateway.http.errors import ApiError, ClientLeftError, to_api_error
from paceline.services.gateway.http.request_scope import scope_of

T = TypeVar("T")

log = logging.getLogger(__name__)

SEND_SECONDS = 60.0
"""Longest time for which a client may accept no data, in seconds. Then its request is ended, because it occupies a
place on a worker."""
PING_SECONDS = 15.0
"""Time without an event after which a stream sends a ping, in seconds, if its API has pings."""

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""JSON escapes for characters that JSON allows in a text but that clients may take for the end of a line."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` until it ends or the client disconnects, and return its result.

    Raises:
        ClientLeftError: the client disconnected first. `work` has then been cancelled and has ended.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStreamResponse(Response):
    """A response that sends events. It sends its headers with the first event, so that an error before gets a status.

    Args:
        error_events: function that returns the events for an error after the first event.
        ping: function that returns the events to send after PING_SECONDS without an event; None for no pings. A ping
            may be the first event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        error_events: Callable[[ApiError], bytes],
        ping: Callable[[], bytes] | None = None,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        super().__init__()
        self._error_events = error_events
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._ping = ping
        self._send_seconds = send_seconds
        self._has_begun = False
        self._is_silent = True
        """Whether no events have been sent since the last check for a ping."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(None) as limit:
                watch = StallWatch(self._send_seconds, lambda: limit.reschedule(0))
                with contextlib.closing(watch), contextlib.suppress(ClientLeftError):
                    await until_disconnect(receive, self._send_all(scope, receive, send, watch))
        except TimeoutError:
            # Return without ending the response: then the server closes the connection.
            log.warning("a client took nothing for %g seconds; its request was cancelled", self._send_seconds)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send, watch: StallWatch) -> None:
        # Bodies go to the server directly, because middlewares do nothing with them and would cost a call per token.
        send_body = scope_of(scope).send or send
        ping = self._ping
        pings = [asyncio.create_task(self._send_pings(ping, send, send_body))] if ping is not None else []
        try:
            try:
                async with contextlib.aclosing(self._events) as events:
                    async for data in events:
                        watch.begin()
                        await self._send_events(data, send, send_body)
                        watch.end()
            finally:
                await end_tasks(*pings)
        except Exception as error:
            watch.begin()
            answer = to_api_error(error)
            if not self._has_begun:
                await logged_response(answer)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": self._error_events(answer), "more_body": True})
        watch.begin()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, data: bytes, send: Send, send_body: Send) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._is_silent = False
        await send_body({"type": "http.response.body", "body": data, "more_body": True})

    async def _send_pings(self, ping: Callable[[], bytes], send: Send, send_body: Send) -> None:
        """Send a ping after each PING_SECONDS without an event, until the task is cancelled."""
        while True:
            self._is_silent = True
            await asyncio.sleep(PING_SECONDS)
            if self._is_silent:
                await self._send_events(ping(), send, send_body)


def event(data: dict[str, Any], name: str = "") -> bytes:
    """Encode a server-sent event with JSON data, and with the name if it is not empty."""
    named = f"event: {name}\n".encode() if name else b""
    return named + framed(ENCODER.encode(data))


def framed(text: str) -> bytes:
    """Encode a server-sent event whose data is this JSON text."""
    return f"data: {text if text.isascii() else text.translate(_LINE_BREAKS)}\n\n".encode()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
