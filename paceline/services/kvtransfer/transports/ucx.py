"""The transport over UCX (docs/decisions/0004-ucx-binding.md)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from paceline.core.errors import ConfigError, UnavailableError
from paceline.services.kvtransfer.transports.transport import ArenaMemory, Source
from paceline.services.kvtransfer.transports.ucx_connection import Abandoned, UcxConnection
from paceline.services.kvtransfer.transports.ucx_serving import UcxServing
from paceline.services.kvtransfer.transports.ucx_wire import MOST_SLOT, Offer

SILENCE_SECONDS = 5.0
_READS_AT_ONCE = 8
_MOST_IDLE = 16

log = logging.getLogger(__name__)

Place = tuple[str, Offer]
"""A source's IPv4 address and its offer. A source that restarts has another offer."""


def open_ucx(memory: ArenaMemory) -> UcxTransport | None:
    """Return the transport if UCX is installed and starts. Otherwise log the reason and return None."""
    try:
        return UcxTransport(memory)
    except ConfigError as error:
        log.info("blocks go between hosts without UCX: %s", error)
        return None


class UcxTransport:
    """A `Transport` over UCX. The library is called on separate threads, for which the event loop waits.

    Args:
        silence_seconds: a read fails if nothing comes from the source for this many seconds.

    Raises:
        ConfigError: UCX is not installed, or does not start.
    """

    name = "ucx"

    def __init__(self, memory: ArenaMemory, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._memory = memory
        self._silence_seconds = silence_seconds
        self._serving = UcxServing(memory)
        self._threads = ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="ucx-read")
        self._idle = _IdleConnections()
        self._closing = threading.Event()

    def offer(self) -> bytes:
        return self._serving.offer.pack()

    async def read(self, source: Source, slots: Sequence[tuple[int, int]]) -> None:
        self._memory.check([here for _, here in slots])
        if not slots:
            return
        try:
            offer = _checked(source.offer, self._memory.slot_bytes, slots)
            place = await _resolve(source.address, self._silence_seconds), offer
            abandoned = threading.Event()
            pairs = [(there, self._memory.slot(here)) for there, here in slots]
            job = self._threads.submit(self._read, place, pairs, lambda: abandoned.is_set() or self._closing.is_set())
            await _outlast(job, abandoned)
        except (UnavailableError, OSError, RuntimeError) as error:  # RuntimeError: submitted after `close`
            raise UnavailableError(f"cannot read from {source.host_id} by UCX: {error}") from error

    async def close(self) -> None:
        self._closing.set()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._threads.shutdown()
        self._idle.close()
        self._serving.close()

    def _read(self, place: Place, pairs: Sequence[tuple[int, memoryview]], abandoned: Callable[[], bool]) -> None:
        """Read blocks on a thread. Nothing touches the memory after this has returned or raised."""
        connection = self._idle.take(place) or UcxConnection(*place)
        try:
            connection.read(pairs, abandoned, self._silence_seconds)
        except (UnavailableError, Abandoned) as error:
            if connection.opening and connection.stands():
                self._idle.put(place, connection)
            else:
                connection.close()
            raise UnavailableError(str(error) or "the read was given up") from None
        except BaseException:
            connection.close()
            raise
        self._idle.put(place, connection)


class _IdleConnections:
    """Connections that are kept for the next read of the same source, the last used one at the end."""

    def __init__(self) -> None:
        self._connections: list[tuple[Place, UcxConnection]] = []
        self._lock = threading.Lock()

    def take(self, place: Place) -> UcxConnection | None:
        """Remove and return a working connection to a source, or return None."""
        while connection := self._remove(place):
            if connection.stands():
                return connection
            connection.close()
        return None

    def put(self, place: Place, connection: UcxConnection) -> None:
        with self._lock:
            self._connections.append((place, connection))
            surplus = self._connections[:-_MOST_IDLE]
            del self._connections[:-_MOST_IDLE]
        for _, oldest in surplus:
            oldest.close()

    def close(self) -> None:
        with self._lock:
            connections, self._connections = self._connections, []
        for _, connection in connections:
            connection.close()

    def _remove(self, place: Place) -> UcxConnection | None:
        with self._lock:
            for index, (where, connection) in enumerate(self._connections):
                if where == place:
                    del self._connections[index]
                    return connection
        return None


def _checked(offer: bytes, slot_bytes: int, slots: Sequence[tuple[int, int]]) -> Offer:
    try:
        offered = Offer.parse(offer)
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    if offered.slot_bytes != slot_bytes:
        raise UnavailableError(f"its slots have {offered.slot_bytes} bytes, ours {slot_bytes}")
    if any(not 0 <= there <= MOST_SLOT for there, _ in slots):
        raise UnavailableError("a slot number is out of range")
    return offered


async def _resolve(address: str, timeout: float) -> str:
    """Return the IPv4 address of a gRPC server's host, where the library listens, too."""
    host = address.rpartition(":")[0]
    try:
        async with asyncio.timeout(timeout):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, family=socket.AF_INET)
    except TimeoutError:
        raise UnavailableError(f"the name {host} was not resolved in time") from None
    return str(found[0][4][0])


async def _outlast(job: concurrent.futures.Future[None], abandoned: threading.Event) -> None:
    """Wait for a thread's job to end. If this is cancelled, set `abandoned` and raise only after the end."""
    ended = asyncio.wrap_future(job)
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError as error:
            cancelled = error
            abandoned.set()
            job.cancel()
    if cancelled is not None:
        if not ended.cancelled():
            ended.exception()  # retrieved, so that asyncio does not log it
        raise cancelled
    ended.result()
