"""A gate in front of a TCP server, which can be shut: then nothing passes and no connection ends, as when a network is
split."""

from __future__ import annotations

import asyncio
import contextlib

_PIECE = 1 << 16
_PATIENCE_SECONDS = 2.0
"""Time for which a new connection waits while the gate is shut. Clients give up earlier."""


class Gate:
    """Forwards connections to 127.0.0.1:`port`, from `start` to `close`."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Return the port of the gate."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await self._open.wait()
                there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
                try:
                    await self._both_ways(reader, there_writer, there_reader, writer)
                finally:
                    there_writer.close()
        finally:
            writer.close()
            self._connections.discard(task)

    async def _both_ways(
        self,
        reader: asyncio.StreamReader,
        there_writer: asyncio.StreamWriter,
        there_reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        ways = {
            asyncio.create_task(self._pass_on(reader, there_writer)),
            asyncio.create_task(self._pass_on(there_reader, writer)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE):
                await self._open.wait()
                writer.write(piece)
                await writer.drain()
