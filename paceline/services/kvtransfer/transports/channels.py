"""gRPC channels to the kvtransfer services of other hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc.aio

from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import open_channel

IDLE_SECONDS = 60.0
MOST_IDLE = 16


@dataclass(slots=True)
class _Connection:
    channel: grpc.aio.Channel
    users: int = 0
    used_at: float = 0.0
    """End of the last use, on time.monotonic()."""


class Channels:
    """Channels by address. A channel is opened at its first use, and kept for later uses until `sweep` or `close`.

    Args:
        credentials: credentials that the channels show to the services, and demand of them.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._connections: dict[str, _Connection] = {}

    @contextmanager
    def to(self, address: str) -> Iterator[grpc.aio.Channel]:
        """Yield a channel to the service at `address`. `sweep` does not close the channel during the `with`
        statement.
        """
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = _Connection(open_channel(address, self._credentials))
        connection.users += 1
        try:
            yield connection.channel
        finally:
            connection.users -= 1
            connection.used_at = time.monotonic()

    async def sweep(self) -> None:
        """Close channels that were idle for IDLE_SECONDS, and all idle ones except the MOST_IDLE last used."""
        idle = [(one.used_at, address) for address, one in self._connections.items() if not one.users]
        idle.sort(reverse=True)
        for place, (used_at, address) in enumerate(idle):
            if place >= MOST_IDLE or time.monotonic() - used_at > IDLE_SECONDS:
                connection = self._connections[address]
                if not connection.users:  # closing another channel takes time, and this one may be in use again
                    del self._connections[address]
                    await connection.channel.close(None)

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.channel.close(None)
