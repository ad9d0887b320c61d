"""Bodies of requests: limits of their size, their content and their time, and their decompression."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.services.gateway.http.bounds import BYTE_COST, OBJECT_COST, PIECE_BYTES, VALUE_COST
from paceline.services.gateway.http.error_responses import logged_response
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.request_scope import RequestScope, scope_of

BODY_SECONDS = 60.0
UPLOAD_PATH = "/v1/files"
UPLOAD_SECONDS = 1800.0
"""Longest time in which the body of a file upload must arrive, in seconds."""
FORM_BYTES = 64 << 10
"""Largest number of bytes that the body of an upload may have besides its file."""
CODINGS = ("gzip", "x-gzip", "deflate")
"""Supported compressions of a body, as Content-Encoding names them."""
MEMBER_BYTES = 1 << 10
"""Bytes that each member of a gzip body counts in addition to its content, because a body could have a million empty
members."""

_MOST_DIGITS = 20
"""Largest number of digits of a Content-Length."""
_GZIP, _ZLIB, _RAW = 31, 15, -15
"""zlib's `wbits` for the formats gzip, zlib and raw deflate."""


class BodyMiddleware:
    """Middleware that decompresses bodies, and refuses bodies that are too large or arrive too slowly.

    The size is checked in Content-Length and again while the body arrives. Both the bytes that arrive and the bytes
    that they decompress to are limited. The JSON values in the body, and the memory that they will use, are counted in
    the scope of the request.

    Args:
        max_bytes: size of the largest body, in bytes.
        max_upload_bytes: size of the largest file upload, in bytes. Uploads have a limit of their own, because the
            gateway does not keep them in memory.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        max_seconds: float = BODY_SECONDS,
        max_upload_bytes: int = 0,
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
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "0")
        if not announced.isdecimal() or len(announced) > _MOST_DIGITS or int(announced) > most:
            await logged_response(ApiError(413, message))(scope, receive, send)
            return
        limited = LimitedBody(receive, most, seconds, message).receive
        coding = headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            limited = DecodedBody(limited, coding, most, f"decompressed, {message}").receive
            plain = [pair for pair in scope["headers"] if pair[0] not in (b"content-encoding", b"content-length")]
            scope = {**scope, "headers": plain}
        request = scope_of(scope)
        if scope["path"] != UPLOAD_PATH:
            limited = CountedBody(limited, request, scope["path"]).receive
        try:
            await self._app(scope, limited, send)
        finally:
            request.memory.close()


class LimitedBody:
    """A body as it arrives. Reading it raises HTTPException if it is too large or arrives too slowly."""

    def __init__(self, receive: Receive, most: int, seconds: float, too_large: str) -> None:
        self._receive = receive
        self._left = most
        self._seconds = seconds
        self._too_large = too_large
        self._deadline: float | None = asyncio.get_running_loop().time() + seconds

    async def receive(self) -> Message:
        try:
            # After the body, the next event is the client's disconnect, which has no deadline.
            async with asyncio.timeout_at(self._deadline):
                event = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {self._seconds:g} seconds") from None
        self._left -= len(event.get("body", b""))
        if not event.get("more_body", False):
            self._deadline = None
        if self._left < 0:
            raise HTTPException(413, self._too_large)
        return event


class CountedBody:
    """A body whose JSON values and memory are counted as it arrives.

    Reading it raises HTTPException if a count exceeds its limit. Bytes are passed on at once. Bodies that are not JSON
    are counted, too, because the type of a body is not known here.
    """

    def __init__(self, receive: Receive, request: RequestScope, path: str) -> None:
        self._receive = receive
        self._request = request
        self._path = path

    async def receive(self) -> Message:
        event = await self._receive()
        data = event.get("body", b"")
        for begin in range(0, len(data), PIECE_BYTES):
            if begin:
                await asyncio.sleep(0)  # other requests go on between pieces
            self._add(data[begin : begin + PIECE_BYTES])
        return event

    def _add(self, piece: bytes) -> None:
        request = self._request
        count = request.json_count
        objects, values = count.objects, count.values
        count.add(piece)
        try:
            request.bounds.check_count(count, self._path)
        except ApiError as error:
            # The framework takes other errors for those of a broken body.
            raise HTTPException(error.status, str(error)) from None
        objects, values = count.objects - objects, count.values - values
        request.memory.take(request.owner, BYTE_COST * len(piece) + OBJECT_COST * objects + VALUE_COST * values)


class DecodedBody:
    """A compressed body, which is decompressed piece by piece.

    Reading it raises HTTPException if it is too large, is damaged, or has an unsupported compression.

    Args:
        most: largest size of the decompressed body, in bytes.
    """

    def __init__(self, receive: Receive, coding: str, most: int, too_large: str) -> None:
        self._receive = receive
        self._coding = coding
        self._left = most
        self._too_large = too_large
        self._inflater: Inflater | None = None
        self._pieces: Iterator[bytes] = iter(())
        self._is_complete = False
        self._has_ended = False

    async def receive(self) -> Message:
        while not self._has_ended:
            if (piece := next(self._pieces, None)) is not None:
                self._count(len(piece))
                await asyncio.sleep(0)  # other requests go on between pieces
                if piece:
                    return {"type": "http.request", "body": piece, "more_body": True}
            elif self._is_complete:
                self._end()
                return {"type": "http.request", "body": b"", "more_body": False}
            else:
                event = await self._receive()
                if event["type"] != "http.request":
                    return event
                self._is_complete = not event.get("more_body", False)
                if data := event.get("body", b""):
                    self._begin(data)
        return await self._receive()

    def _begin(self, data: bytes) -> None:
        """Start the decompression with the first bytes that have arrived."""
        if self._coding not in CODINGS:
            message = (
                f"a body with Content-Encoding: {self._coding[:80]} cannot be read here; send it as gzip, deflate, or "
                "uncompressed without this header"
            )
            raise HTTPException(415, message, {"Accept-Encoding": "gzip, deflate"})
        if self._inflater is None:
            self._inflater = Inflater(self._coding, data[0])
        self._pieces = self._inflater.pieces(data)

    def _count(self, size: int) -> None:
        self._left -= size or MEMBER_BYTES
        if self._left < 0:
            raise HTTPException(413, self._too_large)

    def _end(self) -> None:
        self._has_ended = True
        if self._inflater is not None and not self._inflater.is_whole:
            raise damaged(self._coding, "its end is missing")


class Inflater:
    """Decompresses gzip or deflate.

    Args:
        coding: one of CODINGS.
        first: the first byte of the body. By the standard, deflate has the zlib format, but some clients send raw
            deflate, which this byte shows.
    """

    def __init__(self, coding: str, first: int) -> None:
        self._coding = coding
        self._format = (_ZLIB if first & 15 == zlib.DEFLATED else _RAW) if coding == "deflate" else _GZIP
        self._stream = zlib.decompressobj(self._format)

    @property
    def is_whole(self) -> bool:
        """Whether the bytes so far form a complete body."""
        return self._stream.eof

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Decompress further bytes and yield their content in pieces, with an empty piece for each further gzip member.

        Raises HTTPException if the bytes are damaged.
        """
        try:
            while data:
                if self._stream.eof:
                    if self._format != _GZIP:
                        raise damaged(self._coding, "there are bytes after its end")
                    self._stream = zlib.decompressobj(self._format)
                    yield b""
                if piece := self._stream.decompress(data, PIECE_BYTES):
                    yield piece
                data = self._stream.unconsumed_tail or self._stream.unused_data
            # The last bytes may hold more than one piece.
            while not self._stream.eof and (piece := self._stream.decompress(b"", PIECE_BYTES)):
                yield piece
        except zlib.error as error:
            raise damaged(self._coding, str(error)) from None


def damaged(coding: str, reason: str) -> HTTPException:
    """Return the error for a body that cannot be decompressed as its Content-Encoding says."""
    return HTTPException(400, f"the body is not valid {coding}, as its Content-Encoding says: {reason}")
