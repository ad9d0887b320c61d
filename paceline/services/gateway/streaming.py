"""Answers that live as long as their client: server-sent events, and cancelling when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.services.gateway.errors import to_api_error
from paceline.services.gateway.generation import Generation
from paceline.services.gateway.responses import ResponseFormat
from paceline.services.gateway.schemas import StreamOptions
from paceline.services.gateway.stall_watch import StallWatch

T = TypeVar("T")

log = logging.getLogger(__name__)

SEND_SECONDS = 60.0
"""A client that takes nothing for so long is given up, because its request holds a place on a worker."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_DONE = b"data: [DONE]\n\n"
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""JSON allows these characters, and clients that read line by line break at them."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the client went first; then `work` has been cancelled and has ended."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def event_stream(
    generation: Generation, response_format: ResponseFormat, options: StreamOptions
) -> AsyncGenerator[bytes]:
    """The server-sent events of a generation, joined where they are ready together. Must be closed when left early."""
    async with contextlib.aclosing(generation.batches()) as batches:
        async for batch in batches:
            events = []
            for chunk in (chunk for delta in batch for chunk in response_format.chunks(delta)):
                if options.include_usage:
                    continuous = options.continuous_usage_stats
                    chunk["usage"] = response_format.usage_so_far(generation.usage()) if continuous else None
                events.append(_event(chunk))
            if events:
                yield b"".join(events)
    if options.include_usage:
        yield _event(response_format.usage_chunk(generation.usage()))
    yield _DONE


class EventStreamResponse(Response):
    """Sends events. Headers wait for the first event, so that what fails before it gets a status of its own."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], send_seconds: float = SEND_SECONDS) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._send_seconds = send_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched_send(message: Message) -> None:
            watch.begin()
            await send(message)
            watch.end()

        try:
            async with asyncio.timeout(None) as limit:
                watch = StallWatch(self._send_seconds, lambda: limit.reschedule(0))
                with contextlib.closing(watch):
                    await until_disconnect(receive, self._send_all(scope, receive, watched_send))
        except TimeoutError:
            # Returning without an end makes the server close the connection.
            log.warning("a client took nothing for %g seconds; its request was cancelled", self._send_seconds)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        async with contextlib.aclosing(self._events) as events:
            try:
                async for data in events:
                    if not begun:
                        begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                answer = to_api_error(error)
                if not begun:
                    await answer.response()(scope, receive, send)
                    return
                await send({"type": "http.response.body", "body": _event(answer.body) + _DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: dict[str, Any]) -> bytes:
    text = _ENCODER.encode(data)
    return f"data: {text if text.isascii() else text.translate(_LINE_BREAKS)}\n\n".encode()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
