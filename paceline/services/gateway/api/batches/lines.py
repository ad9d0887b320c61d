"""The lines of an input file: reads and checks them, sends them to the application, and writes lines of answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from paceline.services.gateway.api.batches.batch import ENDPOINTS, LineError
from paceline.services.gateway.http.access.callers import Caller
from paceline.services.gateway.http.bounds import Bounds, count_json
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.middleware import LINE_CALLER
from paceline.services.gateway.http.reading import read_json
from paceline.services.gateway.http.request_scope import scope_of

MAX_ID_CHARACTERS = 512
LIMIT_KINDS = ("requests", "tokens")
"""Types of errors for a key that has used up its limit. If workers have no room, the error has another type."""
MAX_ERRORS = 100
"""Largest number of errors of a file that are reported. The check ends after them."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """A request in an input file."""

    number: int
    """Number of the line in its file, from 1."""
    custom_id: str
    body: Json
    url: str


@dataclass(frozen=True, slots=True)
class LineReply:
    """The application's response to a line's request."""

    status: int
    request_id: str
    body: str
    """The JSON text of its body, of ASCII alone. It is not parsed, because it may have millions of numbers."""
    retry_after: float = 0.0
    """Seconds after which a refused line may be tried again; 0 if the response does not say it."""
    error_type: str = ""
    """OpenAI's type of the error, whatever the form of the body; "" if there is no error."""

    @property
    def is_over_limit(self) -> bool:
        """Whether the line was refused because its batch's key has used up a limit."""
        return self.status == 429 and self.error_type in LIMIT_KINDS


class InvalidLineError(Exception):
    """A line is not a request that a batch may contain."""

    def __init__(self, error: LineError) -> None:
        super().__init__(error.message)
        self.error = error


async def split_lines(content: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers from 1.

    A line of more than `max_bytes` is cut one byte after the limit: it is still seen as too long, and memory stays
    bounded.
    """
    number, rest = 1, b""
    async for piece in content:
        *whole, last = piece.split(b"\n")
        for line in whole:
            if line := (rest + line)[: max_bytes + 1].strip():
                yield number, line
            number, rest = number + 1, b""
        rest = (rest + last)[: max_bytes + 1]
    if rest := rest.strip():
        yield number, rest


def read_line(number: int, data: bytes, endpoints: Sequence[str], max_bytes: int, bounds: Bounds | None = None) -> Line:
    """Return the request in a line, whose URL must be one of `endpoints`. Raises InvalidLineError."""

    def invalid(code: str, message: str, param: str | None = None) -> InvalidLineError:
        return InvalidLineError(LineError(code, message, number, param))

    if len(data) > max_bytes:
        raise invalid("line_too_long", f"the line has more than {max_bytes} bytes, the --max-body-bytes of the gateway")
    try:
        if bounds is not None:
            bounds.check_count(count_json(data), "")
    except ApiError as error:
        raise invalid("line_too_long", str(error).replace("the body", "the line", 1)) from None
    try:
        value = read_json(data)
    except ValueError:
        raise invalid("invalid_json_line", "the line is not valid JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise invalid("invalid_json_line", "the line must be a JSON object")
    custom_id, body = value.get("custom_id"), value.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARACTERS:
        message = f"custom_id must be a text of 1 to {MAX_ID_CHARACTERS} characters"
        raise invalid("missing_required_parameter", message, "custom_id")
    if value.get("method") != "POST":
        raise invalid("invalid_method", 'method must be "POST"', "method")
    url = value.get("url")
    if not isinstance(url, str) or url not in endpoints:
        code = "mismatched_url" if url in ENDPOINTS else "invalid_url"
        raise invalid(code, f"url must be {' or '.join(map(repr, endpoints))}", "url")
    if not isinstance(body, dict):
        raise invalid("missing_required_parameter", "body must be a JSON object", "body")
    # In a message batch, such a line gets an error of its own when it is called, and the other lines are answered.
    for field in ("stream", "background") if url in ENDPOINTS else ():
        if body.get(field):
            raise invalid("invalid_request", f"body.{field}: a line of a batch cannot have it", f"body.{field}")
    if str(body.get("encoding_format")).startswith("bytes"):
        message = "body.encoding_format: a line of a batch is answered with JSON; use float or base64"
        raise invalid("invalid_request", message, "body.encoding_format")
    return Line(number, custom_id, body, url)


class InputCheck:
    """The check of an input file, line by line.

    Args:
        max_lines: largest number of lines of a batch.
        max_bytes: largest size of a line.
        bounds: limits on the JSON of a line; None is no limit.
    """

    def __init__(self, endpoint: str, max_lines: int, max_bytes: int, bounds: Bounds | None = None) -> None:
        self.count = 0
        """Number of lines checked so far."""
        self.errors: list[LineError] = []
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._bounds = bounds
        self._seen: set[bytes] = set()
        """Digests of the lines' ids. Digests save memory, because there may be many long ids."""

    @property
    def is_over(self) -> bool:
        """Whether the check may stop, because it has found as many errors as are reported."""
        return len(self.errors) >= MAX_ERRORS or self.count > self._max_lines

    def add(self, number: int, data: bytes) -> None:
        """Check the next line."""
        self.count += 1
        if self.count > self._max_lines:
            message = f"the file has more than {self._max_lines} lines (--max-batch-lines)"
            self.errors.append(LineError("too_many_lines", message))
            return
        try:
            line = read_line(number, data, [self._endpoint], self._max_bytes, self._bounds)
        except InvalidLineError as error:
            self.errors.append(error.error)
            return
        digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            message = f"custom_id {line.custom_id[:80]!r} is that of an earlier line, too"
            self.errors.append(LineError("duplicate_custom_id", message, number, "custom_id"))
        self._seen.add(digest)

    def finish(self) -> None:
        """End the check. Add an error if the file has no lines."""
        if self.count == 0:
            self.errors.append(LineError("empty_file", "the file has no lines"))


def answer_line(custom_id: str, answer: LineReply) -> str:
    """Return the line of an output file with the application's response to a line."""
    head = _line(custom_id, {"status_code": answer.status, "request_id": answer.request_id, "body": None}, None)
    before, _, after = head.rpartition("null},")
    return f"{before}{answer.body}}},{after}"


def error_line(custom_id: str, code: str, message: str) -> str:
    """Return the line of an error file for a line without a response."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: Json | None, error: Json | None) -> str:
    made = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(made, separators=(",", ":"))


async def call(app: ASGIApp, endpoint: str, line: Line, caller: Caller) -> LineReply:
    """Send a line's request to the application and return the response. Cancelling the call ends the request.

    Args:
        caller: the owner of the batch, whose key's limits hold. The key itself is not needed.
    """
    if line.body.get("stream"):
        return LineReply(400, "", json.dumps({"error": {"message": "stream: a batch has no streams; leave it out"}}))
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
    told = await asyncio.to_thread(_in_ascii, b"".join(content) or b"null")
    seconds, error_type = float(names.get(b"retry-after", 0)), scope_of(scope).error_type
    return LineReply(start["status"], names.get(b"x-request-id", ""), told, seconds, error_type)


def _in_ascii(content: bytes) -> str:
    """Return JSON in ASCII. Some readers of files would end lines at other characters."""
    text = content.decode()
    return text if text.isascii() else json.dumps(json.loads(text), separators=(",", ":"))
