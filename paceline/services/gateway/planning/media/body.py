"""The bodies of files that are fetched: their sizes, how fast they are read, and unpacking."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
import zlib
from collections.abc import Callable
from typing import TypeAlias

from paceline.services.gateway.http.errors import MediaError, UnreachableMediaError

BYTES_PER_SECOND = 256 << 20
"""Largest rate of reading and unpacking, over all files, in bytes per second. On a laptop this takes a third of the
event loop's time, and other requests wait meanwhile."""
PIECE_COST = 4 << 10
"""Cost of parsing a piece of a body, as the number of bytes whose reading takes as long."""
LEAST_PAUSE = 0.001
"""Shortest pause, in seconds. Shorter ones are left out, so a file may be read this much earlier than the rate says."""
UNPACKED_BYTES = 256 << 10
"""Largest number of bytes that one call unpacks. A few compressed bytes may unpack to a thousand times as many."""
_PACKED_BYTES = 32 << 10
"""Number of compressed bytes that are collected before the thread unpacks them, because each call takes time."""
_MAX_PIECES, _PIECE_BYTES = 1024, 64
"""A body of more than `_MAX_PIECES` pieces is refused if they have fewer than `_PIECE_BYTES` bytes on average."""

Take: TypeAlias = Callable[[int], None]
"""A function that counts received bytes, and raises an error if there is no memory for them."""


class Pace:
    """Limits the rate at which all files together are read to BYTES_PER_SECOND.

    After each read, a file waits. So files that are read at the same time get equal rates.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = 0.0
        """Instant at which the rate allows all counted bytes, in seconds on `clock`."""

    def count(self, handled: int) -> None:
        """Count bytes that were read or unpacked towards the rate."""
        self._due = max(self._due, self._clock()) + handled / BYTES_PER_SECOND

    @property
    def pause(self) -> float:
        """Seconds until the rate allows the next bytes; 0 for a pause that is too short."""
        left = self._due - self._clock()
        return left if left >= LEAST_PAUSE else 0.0

    async def rest(self) -> None:
        """Wait until the rate allows the next bytes. Even without a pause, other tasks get a turn."""
        await asyncio.sleep(self.pause)


class MediaBody:
    """A response's body as it arrives.

    Args:
        max_bytes: largest size of the unpacked file.
        unpackers: threads that unpack. See `machine.yield_to_others`.

    The constructor and the methods raise MediaError if the file is too large or has an encoding that was not asked for.
    """

    def __init__(
        self, max_bytes: int, headers: dict[str, str], take: Take, unpackers: concurrent.futures.Executor, pace: Pace
    ) -> None:
        self._max_bytes = max_bytes
        self._take = take
        self._unpackers = unpackers
        self._pace = pace
        self._content = bytearray()
        self._packed = bytearray()
        """Compressed bytes that are not unpacked yet."""
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
        """Add the next piece of the body.

        Raises UnreachableMediaError if there are too many small pieces, zlib.error, and whatever `take` raises.
        """
        self._pieces += 1
        self._received += len(data)
        self._check_size(self._received)
        if self._pieces > max(_MAX_PIECES, self._received // _PIECE_BYTES):
            raise UnreachableMediaError("the server sent the file in too many small pieces")
        self._pace.count(PIECE_COST)
        if self._inflater is None:
            self._keep(data)
            return
        self._packed += data
        if len(self._packed) >= _PACKED_BYTES:
            await self._unpack(self._inflater)

    async def end(self) -> bytearray:
        """Return the whole file. Raises the errors of `add`, and zlib.error if a compressed file is not complete."""
        if self._inflater is not None:
            await self._unpack(self._inflater)
            if not self._inflater.eof:
                raise zlib.error("the compressed file is not complete")
        return self._content

    async def _unpack(self, inflater: zlib._Decompress) -> None:
        data, self._packed = bytes(self._packed), bytearray()
        loop, is_complete = asyncio.get_running_loop(), not data
        while not is_complete:
            most = min(UNPACKED_BYTES, self._max_bytes - len(self._content) + 1)
            unpacked = await loop.run_in_executor(self._unpackers, inflater.decompress, data, most)
            if inflater.unused_data:
                raise zlib.error("data after the end of the compressed file")
            self._check_size(len(self._content) + len(unpacked))
            self._keep(unpacked)
            data = inflater.unconsumed_tail
            is_complete = not data and len(unpacked) < most
            self._pace.count(len(unpacked))
            await self._pace.rest()

    def _keep(self, data: bytes | bytearray) -> None:
        self._take(len(data))
        self._content += data

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise MediaError(f"the file is larger than {self._max_bytes} bytes (--max-media-size); send a smaller one")
