"""An HTTP server that does whatever a test wants: each path is a function that reads and writes the raw connection."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeAlias

Handler: TypeAlias = Callable[[asyncio.StreamWriter], Awaitable[None]]


def response(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """Return a whole response. A header Content_Length of "" leaves it out."""
    fields = {"Content_Length": str(len(body)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items() if value)
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


def answer(*parts: bytes) -> Handler:
    """Return a handler that sends bytes and closes the connection."""

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.writelines(parts)
        await writer.drain()

    return send


def redirect(location: str, status: str = "302 Found") -> Handler:
    return answer(response(b"", status, Location=location))


def repeat(begin: bytes, part: bytes, pause: float = 0.0) -> Handler:
    """Return a handler that sends a part again and again until the client leaves."""

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)

    return send


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
FILE = bytes(range(256)) * 200
PACKED = response(Content_Encoding="gzip", Content_Length="")
TOO_MUCH: dict[str, Handler] = {
    "announced": answer(response(b"", Content_Length="10000000000")),
    "endless": repeat(response(Content_Length=""), bytes(5000)),
    "endless in chunks": repeat(CHUNKED, b"1000\r\n" + bytes(4096) + b"\r\n"),
    "endless packed nothing": repeat(PACKED + gzip.compress(b"")[:10], b"\x00\x00\x00\xff\xff" * 1000),
    "packed bomb": answer(response(gzip.compress(bytes(50_000_000)), Content_Encoding="gzip")),
}
"""Files that are larger than a limit below 50 MB."""
BROKEN: dict[str, Handler] = {
    "nothing": answer(),
    "no HTTP": answer(b"\x00\x01\x02" * 100),
    "half a head": answer(b"HTTP/1.1 200 OK\r\nContent-"),
    "endless head": repeat(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 1000),
    "interim responses": repeat(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "half a file": answer(response(FILE, Content_Length=str(len(FILE) + 1))),
    "half a chunk": answer(CHUNKED, b"c8\r\n", FILE[:100]),
    "wrong chunk": answer(CHUNKED, b"xyz\r\n", FILE[:100]),
    "huge chunk size": answer(CHUNKED, b"f" * 100 + b"\r\n", FILE),
    "two lengths": answer(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n123456"),
    "length that is no number": answer(response(FILE, Content_Length="-5")),
    "tiny chunks": repeat(CHUNKED, b"1\r\nx\r\n" * 1000),
    "half a packed file": answer(response(gzip.compress(FILE)[:-20], Content_Encoding="gzip")),
    "a little more behind a packed file": answer(response(gzip.compress(FILE) + b"more", Content_Encoding="gzip")),
    "more behind a packed file": repeat(PACKED + gzip.compress(FILE), FILE),
    "not packed": answer(response(FILE, Content_Encoding="gzip")),
    "missing": answer(response(b"no", "404 Not Found")),
    "failing": answer(response(b"", "500 Oops")),
    "empty": answer(response(b"", "204 No Content", Content_Length="")),
    "part": answer(response(FILE, "206 Partial Content")),
    "redirect to nowhere": answer(response(b"", "302 Found")),
    "redirect to an invalid URL": redirect("http://[::1"),
    "loop": redirect("/"),
}
"""Answers that are no complete file."""
SLOW: dict[str, Handler] = {
    "silent": repeat(b"", b"", 0.01),
    "drips its head": repeat(b"HTTP/1.1 200 OK\r\n", b"a", 0.01),
    "drips its file": repeat(response(Content_Length=""), b"a", 0.01),
}
"""Answers that take too long."""


class HostileServer:
    """The running server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.heads: list[bytes] = []
        """What clients have sent."""
        self.open = 0
        """Connections that are open."""

    def url(self, path: str = "/", host: str = "media.test") -> str:
        return f"http://{host}:{self.port}{path}"


@contextlib.asynccontextmanager
async def serve(
    handlers: Mapping[str, Handler], tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[HostileServer]:
    """Serve paths on an address; port 0 is a free one."""

    tasks: set[asyncio.Task[None] | None] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.open += 1
        tasks.add(asyncio.current_task())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            running.heads.append(head)
            await handlers[head.split()[1].decode()](writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            running.open -= 1
            writer.close()

    server = await asyncio.start_server(connected, host, port, ssl=tls)
    running = HostileServer(server.sockets[0].getsockname()[1])
    try:
        yield running
    finally:
        server.close()
        for task in tasks:
            if task is not None:
                task.cancel()
