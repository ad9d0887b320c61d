"""Services of other hosts: channels to them, and the path on which their blocks are read."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc.aio

from paceline.core.errors import UnavailableError
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.rpc import open_channel
from paceline.services.common.secret import Secret
from paceline.services.kvtransfer.transport import Source, Transport

IDLE_SECONDS = 60.0
"""An unused channel is closed after this, when another one is wanted."""
RETRY_SECONDS = (20.0, 40.0)
"""A path that failed is tried again after a time between these."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Connection:
    channel: grpc.aio.Channel
    users: int = 0
    used_at: float = 0.0
    shut: dict[str, float] = field(default_factory=dict)
    """By name of transport: when it may be tried again, on time.monotonic()."""


class Peers:
    """Connections to the services of other hosts, by address, made when they are first wanted.

    Args:
        transports: best first. The last one is what remains when all others fail.
        secret: that of the cluster.
    """

    def __init__(self, transports: Sequence[Transport], secret: Secret) -> None:
        self._transports = transports
        self._secret = secret
        self._connections: dict[str, _Connection] = {}

    @contextmanager
    def at(self, address: str) -> Iterator[Peer]:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = _Connection(open_channel(address, self._secret))
        connection.users += 1
        try:
            yield Peer(address, connection, self._transports)
        finally:
            connection.users -= 1
            connection.used_at = time.monotonic()

    async def sweep(self) -> None:
        """Closes what nobody has used for long."""
        now = time.monotonic()
        for address, connection in list(self._connections.items()):
            if not connection.users and now - connection.used_at > IDLE_SECONDS:
                del self._connections[address]
                await connection.channel.close(None)

    async def close(self) -> None:
        """Ends what is under way."""
        for connection in self._connections.values():
            await connection.channel.close(None)
        for transport in self._transports:
            await transport.close()


class Peer:
    """One of them, while it is used."""

    def __init__(self, address: str, connection: _Connection, transports: Sequence[Transport]) -> None:
        self.address = address
        self.channel = connection.channel
        self._shut = connection.shut
        self._transports = transports

    async def read(
        self, key: Key, offer: pb.Offer, slots: Sequence[tuple[int, int]], damaged: Callable[[], int]
    ) -> str:
        """Pulls blocks (slot there, slot here) on the best path that works; returns its name.

        Args:
            key: of the hold there.
            offer: how that arena can be read.
            damaged: counts the blocks here that are not what they should be.

        Raises:
            UnavailableError: no path works.
            StaleError: the hold has ended there.
        """
        usable = [transport for transport in self._transports if transport.name in offer.transports]
        open_ones = [each for each in usable if self._shut.get(each.name, 0.0) <= time.monotonic()]
        for transport in open_ones or usable[-1:]:
            source = Source(offer.host_id, self.address, offer.transports[transport.name], self.channel, key)
            try:
                await transport.read(source, slots)
                if not (count := damaged()):
                    return transport.name
                self._avoid(transport, f"{count} of {len(slots)} blocks differ from their digests")
            except UnavailableError as error:
                self._avoid(transport, str(error))
        raise UnavailableError(f"the blocks of {key} cannot be read from {self.address}")

    def _avoid(self, transport: Transport, reason: str) -> None:
        """Leaves out a path for a while."""
        self._shut[transport.name] = time.monotonic() + random.uniform(*RETRY_SECONDS)
        log.warning("blocks of %s cannot be read over %s: %s", self.address, transport.name, reason)
