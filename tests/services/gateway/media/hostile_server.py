"""An HTTP server that does whatever a test wants: each path is a function that reads and writes the raw connection."""

from __future__ import annotations

import asyncio
import contextlib
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
async def serve(handlers: Mapping[str, Handler], tls: ssl.SSLContext | None = None) -> AsyncIterator[HostileServer]:
    """Serve paths on a free port of 127.0.0.1."""

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

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    running = HostileServer(server.sockets[0].getsockname()[1])
    try:
        yield running
    finally:
        server.close()
        for task in tasks:
            if task is not None:
                task.cancel()
