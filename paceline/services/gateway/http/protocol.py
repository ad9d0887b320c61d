"""HTTP limits of request heads, and answers to HTTP/1.0.

uvicorn's own HTTP connection limits neither the size of a request's head nor the time in which it arrives. One client
could fill the memory, and many connections could stay open for ever, before our code sees a request.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10
"""Largest size of a request line together with its headers, in bytes."""
HEAD_SECONDS = 30.0
"""Longest time in which a head must arrive, in seconds. Idle kept-alive connections are closed by uvicorn."""
OLD_VERSIONS = ("0.9", "1.0")
"""Versions of HTTP that do not know chunked transfer encoding."""
TOO_LARGE = f"The head of the request is larger than {MAX_HEAD_BYTES} bytes."


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP connection, with limits of the size of a request's head and of the time in which it arrives."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = False
        self._head_bytes = 0
        self._chunk_bytes = 0
        """Size of the received data that is being parsed, in bytes; 0 after another request has ended in this data."""
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
        if self.scope["http_version"] in OLD_VERSIONS:
            self.cycle.waiting_for_100_continue = False  # such a client knows no status 100
            self.cycle.send = UnchunkedSend(self.cycle)  # type: ignore[assignment, method-assign]

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


class UnchunkedSend:
    """The `send` function of an answer to a client whose version of HTTP does not know chunks.

    The end of a body of unknown length is the end of the connection, which uvicorn closes after each such answer.
    uvicorn itself would send this body in chunks.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = True

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)  # type: ignore[arg-type]
