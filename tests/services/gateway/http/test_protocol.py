"""A request head that is too large, or never ends, costs the gateway nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from paceline.services.gateway.http import listener
from tests.services.gateway.conftest import PATIENCE, StartStack

HEALTH = b"GET /ping HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
async def connection(start_stack: StartStack) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    stack = await start_stack()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
    async with asyncio.timeout(PATIENCE):
        yield reader, writer
    writer.close()


async def test_an_endless_head_is_cut_off(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    reader, writer = connection
    writer.write(HEALTH + b"X-Endless: ")
    sent = 0
    try:
        while sent < 100 * listener.MAX_HEAD_BYTES and not reader.at_eof():
            writer.write(b"a" * 4096)
            await writer.drain()
            sent += 4096
        assert b"400" in await reader.readline()
    except ConnectionError:
        pass  # the gateway closed the connection while we wrote
    assert sent < 100 * listener.MAX_HEAD_BYTES


async def test_a_large_head_within_the_bounds_is_answered(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    reader, writer = connection
    for _ in range(2):  # the second request on this connection has limits of its own
        for part in (HEALTH, b"X-A: " + b"a" * 40_000 + b"\r\n", b"\r\n"):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in answer


@pytest.mark.parametrize("begun", [b"", b"G", HEALTH])
async def test_a_head_that_does_not_come_ends_the_connection(
    begun: bytes, start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", 0.2)
    stack = await start_stack()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
    writer.write(begun)
    async with asyncio.timeout(PATIENCE):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.slow
async def test_a_connection_whose_request_is_answered_stays(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", 0.2)
    stack = await start_stack()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
    async with asyncio.timeout(PATIENCE):
        for _ in range(2):
            writer.write(HEALTH + b"\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.4)
    writer.close()


class Transport(asyncio.Transport):
    """A connection that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


LARGE = b"X-A: " + b"a" * listener.MAX_HEAD_BYTES
POST = b"POST /ping HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize(
    ("chunks", "is_refused"),
    [
        ([HEALTH + LARGE + b"\r\n\r\n"], True),
        ([HEALTH + LARGE], True),
        ([HEALTH + LARGE[:-1000], b"a" * 1000], True),
        ([POST, b"b" * 100_000 + HEALTH], False),
        ([POST + b"b" * 100_000 + HEALTH, b"\r\n"], False),
    ],
)
async def test_each_byte_of_a_head_counts_and_no_other(chunks: list[bytes], is_refused: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    connection = listener.BoundedHttp(config=uvicorn.Config(app), server_state=ServerState(), app_state={})
    transport = Transport()
    connection.connection_made(transport)
    for chunk in chunks:
        connection.data_received(chunk)
        await asyncio.sleep(0)
    assert (b"400 Bad Request" in transport.written) == transport.is_closing() == is_refused
    connection.connection_lost(None)
