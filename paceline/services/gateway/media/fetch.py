"""Fetches files over HTTP, with limits on time, size and redirects, and only from addresses that the guard allows.

h11 reads the protocol and asyncio makes the connections: each file has a connection of its own, to the address that was
checked. A client library would resolve the name again, keep connections, follow redirects and unpack contents, and each
of these would have to be guarded.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import ipaddress
import os
import socket
import ssl
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias
from urllib.parse import urljoin

import h11

import paceline
from paceline.services.gateway.errors import MediaError, UnreachableMediaError
from paceline.services.gateway.media.guard import Guard, Target

CONNECT_SECONDS = 5.0
"""Longest time to connect to a server, in seconds. Up to four addresses share it."""
REDIRECTS = 5
"""Most redirects that are followed."""
_ADDRESSES = 4
"""Most addresses of a server that are tried."""
_READ_BYTES = 64 << 10
"""Bytes that are read at once."""
_PACKED_BYTES = 32 << 10
"""Bytes that are unpacked at once, but for the last ones. Each call of the thread takes time."""
BYTES_PER_SECOND = 256 << 20
"""Most bytes of all files together that are read in a second, or made by unpacking. At this rate, reading takes about a
third of this thread's time, in which other requests wait."""
_PAUSE_SECONDS = 0.001
"""Shortest pause. Files that come faster than the rate are read without a pause for this long."""
_HEAD_BYTES = 32 << 10
_INTERIM_RESPONSES = 10
_MAX_PIECES, _PIECE_BYTES = 1024, 64
"""If a body comes in more pieces than this, they must have this size on average: to parse pieces takes time."""
UNPACKED_BYTES = 256 << 10
"""Most bytes that unpacking makes at once. A few bytes may unpack to a thousand times as many."""
_UNPACK_NICENESS = 10
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)

Take: TypeAlias = Callable[[int], None]
"""A function that counts received bytes, and raises an error if there is no memory for them."""


class Resolver(Protocol):
    """A function that returns the IP addresses of a name."""

    async def __call__(self, host: str, /) -> Sequence[str]:
        """Return the addresses. Raises OSError."""
        ...


class SystemResolver:
    """Resolves names as the system does.

    Args:
        threads: threads for the blocking calls. The event loop's own threads must stay free for others: a hostile
            name server answers as late as it can.
    """

    def __init__(self, threads: concurrent.futures.Executor) -> None:
        self._threads = threads

    async def __call__(self, host: str, /) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, functools.partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
        )
        return [str(address[0]) for *_, address in found]


class Fetcher:
    """Fetches files.

    Args:
        max_bytes: the size of the largest file.
    """

    def __init__(self, guard: Guard, resolve: Resolver, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._unpackers = concurrent.futures.ThreadPoolExecutor(1, "unpack", _yield_to_others)
        self._pace = Pace()
        self._guard = guard
        self._resolve = resolve

    def close(self) -> None:
        """End the thread that unpacks. No file may be fetched afterwards."""
        self._unpackers.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, url: str, seconds: float, take: Take) -> bytearray:
        """Return the file at a URL, which must arrive within a time.

        Raises:
            MediaError: the URL or a redirect is not allowed, or the file is too large.
            UnreachableMediaError: the server cannot be reached, is too slow, or does not answer with a file.
            Whatever `take` raises.
        """
        target = self._guard.check_url(url)
        try:
            async with asyncio.timeout(seconds):
                for _ in range(REDIRECTS + 1):
                    found = await self._get(target, take)
                    if isinstance(found, bytearray):
                        return found
                    target = self._guard.check_url(found)
        except TimeoutError:
            raise UnreachableMediaError(f"{target.host} did not send the file within {seconds:g} seconds") from None
        raise UnreachableMediaError(f"the URL led to more than {REDIRECTS} redirects")

    async def _get(self, target: Target, take: Take) -> bytearray | str:
        """Return the file, or the URL to which the server redirects."""
        reader, writer = await self._connect(target)
        try:
            return await self._exchange(target, reader, writer, take)
        except (OSError, h11.ProtocolError, zlib.error) as error:
            raise UnreachableMediaError(f"{target.host} sent a broken response ({str(error)[:120]})") from error
        finally:
            writer.transport.abort()

    async def _connect(self, target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first address that is allowed and can be reached."""
        is_tls = target.scheme == "https"
        addresses = await self._addresses(target)
        for address in addresses:
            try:
                async with asyncio.timeout(CONNECT_SECONDS / len(addresses)):
                    return await asyncio.open_connection(
                        address,
                        target.port,
                        flags=socket.AI_NUMERICHOST,  # so that nothing is resolved again
                        limit=_READ_BYTES,
                        ssl=self._tls if is_tls else None,
                        server_hostname=target.host.removesuffix(".") if is_tls else None,
                    )
            except ssl.SSLError as error:
                raise UnreachableMediaError(f"{target.host} has no valid TLS certificate ({error})") from None
            except (OSError, TimeoutError):
                continue
        raise UnreachableMediaError(f"{target.host} cannot be reached at port {target.port}; check the URL")

    async def _addresses(self, target: Target) -> list[str]:
        """Return the allowed addresses of a server, without repetitions."""
        try:
            texts = await self._resolve(target.host)
        except (OSError, UnicodeError):
            raise UnreachableMediaError(f"{target.host} has no address; check the URL") from None
        allowed = [text for text in dict.fromkeys(texts) if self._guard.allows(ipaddress.ip_address(text))]
        if not allowed:
            raise MediaError(
                f"media may not be fetched from {target.host}, because it has no public address; send the file itself "
                "as a data: URL, or start the server with --allow-private-media if it is yours"
            )
        return allowed[:_ADDRESSES]

    async def _exchange(
        self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, take: Take
    ) -> bytearray | str:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        writer.write((connection.send(_request(target)) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        response = await _next_event(connection, reader)
        for _ in range(_INTERIM_RESPONSES):
            if isinstance(response, h11.InformationalResponse):
                response = await _next_event(connection, reader)
        if not isinstance(response, h11.Response):
            raise UnreachableMediaError(f"{target.host} did not answer the request")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
        if response.status_code in _REDIRECT_STATUSES and "location" in headers:
            return _join(target, headers["location"])
        if response.status_code != 200:
            raise UnreachableMediaError(f"{target.host} answered with status {response.status_code}; check the URL")
        body = _Body(self.max_bytes, headers, take, self._unpackers, self._pace)
        while isinstance(event := await _next_event(connection, reader), h11.Data):
            await body.add(event.data)
        return await body.end()

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()


class Pace:
    """Slows down the tasks that share it, so that together they handle at most BYTES_PER_SECOND."""

    def __init__(self) -> None:
        self._due = 0.0
        """When all bytes that were counted may have been handled, on time.monotonic()."""

    async def count(self, handled: int) -> None:
        """Count bytes that were handled, and wait if there were too many. Other tasks run meanwhile in any case."""
        now = time.monotonic()
        self._due = max(self._due, now) + handled / BYTES_PER_SECOND
        pause = self._due - now
        await asyncio.sleep(pause if pause >= _PAUSE_SECONDS else 0)


class _Body:
    """A response's body as it arrives."""

    def __init__(
        self, max_bytes: int, headers: dict[str, str], take: Take, unpackers: concurrent.futures.Executor, pace: Pace
    ) -> None:
        self._max_bytes = max_bytes
        self._take = take
        self._unpackers = unpackers
        self._pace = pace
        self._content = bytearray()
        self._packed = bytearray()
        """Bytes that are not unpacked yet."""
        self._received = 0
        self._pieces = 0
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip"):
            raise MediaError(
                f"the server sent the file with Content-Encoding {encoding[:40]!r}, which was not asked for"
            )
        self._inflater = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
        self._check_size(int(headers.get("content-length", "0")))

    async def add(self, data: bytes | bytearray) -> None:
        self._pieces += 1
        self._received += len(data)
        self._check_size(self._received)
        if self._pieces > max(_MAX_PIECES, self._received // _PIECE_BYTES):
            raise UnreachableMediaError("the server sent the file in too many small pieces")
        await self._pace.count(len(data))
        if self._inflater is None:
            self._keep(data)
            return
        self._packed += data
        if len(self._packed) >= _PACKED_BYTES:
            await self._unpack(self._inflater)

    async def _unpack(self, inflater: zlib._Decompress) -> None:
        data, self._packed = bytes(self._packed), bytearray()
        loop, is_complete = asyncio.get_running_loop(), not data
        while not is_complete:
            most = min(UNPACKED_BYTES, self._max_bytes - len(self._content) + 1)
            unpacked = await loop.run_in_executor(self._unpackers, inflater.decompress, data, most)
            self._check_size(len(self._content) + len(unpacked))
            self._keep(unpacked)
            await self._pace.count(len(unpacked))
            if inflater.unused_data:
                raise zlib.error("data after the end of the compressed file")
            data = inflater.unconsumed_tail
            is_complete = not data and len(unpacked) < most

    def _keep(self, data: bytes | bytearray) -> None:
        self._take(len(data))
        self._content += data

    async def end(self) -> bytearray:
        if self._inflater is not None:
            await self._unpack(self._inflater)
            if not self._inflater.eof:
                raise zlib.error("the compressed file is not complete")
        return self._content

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise MediaError(f"the file is larger than {self._max_bytes} bytes (--max-media-size); send a smaller one")


def _yield_to_others() -> None:
    """Lower the priority of this thread. On Linux, each thread has its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + _UNPACK_NICENESS
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(niceness, 19))


async def _next_event(connection: h11.Connection, reader: asyncio.StreamReader) -> object:
    """Return the next part of what the server sends."""
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(_READ_BYTES))
        # A read returns at once if data has arrived; then other tasks would never run.
        await asyncio.sleep(0)
    return event


def _request(target: Target) -> h11.Request:
    headers = {
        "Host": target.authority,
        "User-Agent": f"paceline/{paceline.__version__}",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "Connection": "close",
    }
    return h11.Request(method="GET", target=target.path, headers=list(headers.items()))


def _join(target: Target, location: str) -> str:
    try:
        return urljoin(target.url, location)
    except ValueError as error:
        raise UnreachableMediaError(f"{target.host} redirected to a URL that is not valid: {error}") from None
