"""Fetches files over HTTP, with limits on time, size and redirects, and only from addresses that the guard allows.

h11 reads the protocol and asyncio makes the connections: each file has a connection of its own, to the address that was
checked. A client library would resolve the name again, keep connections, follow redirects and unpack contents, and each
of these would have to be guarded.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import ipaddress
import socket
import ssl
import zlib
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import quote, urljoin, urlsplit

import h11

import paceline
from paceline.core.machine import yield_to_others
from paceline.services.gateway.http.errors import MediaError, UnreachableMediaError
from paceline.services.gateway.planning.media.body import MediaBody, Pace, Take
from paceline.services.gateway.planning.media.guard import MediaGuard, Target

CONNECT_SECONDS = 5.0
"""Longest time to connect to a server, in seconds. The addresses that are tried share this time equally."""
REDIRECTS = 5
"""Largest number of redirects that are followed."""
_ADDRESSES = 4
"""Largest number of addresses of a server that are tried."""
_READ_BYTES = 64 << 10
"""Largest number of bytes that one read returns."""
_HEAD_BYTES = 32 << 10
_INTERIM_RESPONSES = 10
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)


class Resolver(Protocol):
    """A function that returns the IP addresses of a host's name."""

    async def __call__(self, host: str, /) -> Sequence[str]:
        """Return the IP addresses of a host. Raises OSError if there are none."""
        ...


class SystemResolver:
    """Resolves hosts' names with the system's resolver.

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
    """Fetches files over HTTP.

    Args:
        max_bytes: largest size of a file.
        pace: limits the rate of all files together.
    """

    def __init__(self, guard: MediaGuard, resolve: Resolver, max_bytes: int, pace: Pace | None = None) -> None:
        self.max_bytes = max_bytes
        self._unpackers = concurrent.futures.ThreadPoolExecutor(1, "unpack", yield_to_others)
        self._pace = pace or Pace()
        self._guard = guard
        self._resolve = resolve

    def close(self) -> None:
        """End the thread that unpacks. No file may be fetched afterwards."""
        self._unpackers.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, url: str, seconds: float, take: Take) -> bytearray:
        """Return the file at a URL, which must arrive within `seconds`.

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
        """Request the target. Return the file, or the URL to which the server redirects."""
        reader, writer = await self._connect(target)
        try:
            return await self._exchange(target, reader, writer, take)
        except (OSError, h11.ProtocolError, zlib.error) as error:
            raise UnreachableMediaError(f"{target.host} sent a broken response ({str(error)[:120]})") from error
        finally:
            writer.transport.abort()

    async def _connect(self, target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first allowed address of the server that can be reached."""
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
        response = await _next_event(connection, reader, self._pace)
        for _ in range(_INTERIM_RESPONSES):
            if isinstance(response, h11.InformationalResponse):
                response = await _next_event(connection, reader, self._pace)
        if not isinstance(response, h11.Response):
            raise UnreachableMediaError(f"{target.host} did not answer the request")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
        if response.status_code in _REDIRECT_STATUSES and "location" in headers:
            return _join(target, headers["location"])
        if response.status_code != 200:
            raise UnreachableMediaError(f"{target.host} answered with status {response.status_code}; check the URL")
        body = MediaBody(self.max_bytes, headers, take, self._unpackers, self._pace)
        while isinstance(event := await _next_event(connection, reader, self._pace), h11.Data):
            await body.add(event.data)
        return await body.end()

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()


async def _next_event(connection: h11.Connection, reader: asyncio.StreamReader, pace: Pace) -> object:
    """Wait for the next part of the server's response, and return h11's event for it."""
    while (event := connection.next_event()) is h11.NEED_DATA:
        data = await reader.read(_READ_BYTES)
        connection.receive_data(data)
        pace.count(len(data))
        await pace.rest()
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
    """Return the URL to which a server redirects. Raises MediaError if it is not an http or https URL.

    Args:
        location: the header Location, in which each character stands for a byte.
    """
    # Bytes outside of ASCII are quoted as they are, because most servers send UTF-8 and some send Latin-1.
    quoted = quote(location, safe=bytes(range(0x80)), encoding="latin-1")
    try:
        url = urljoin(target.url, quoted)
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise UnreachableMediaError(f"{target.host} redirected to a URL that is not valid: {error}") from None
    if scheme not in ("http", "https"):
        raise MediaError(
            f"{target.host} redirected to a URL that begins with {scheme[:80]!r}; a redirect may only lead to http: or "
            "https:"
        )
    return url
