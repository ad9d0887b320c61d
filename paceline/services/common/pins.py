"""Roles whose number of workers a person has set, in Redis: gateways write them, the planner obeys them.

The planner remembers what it has read, and writes it again if Redis has lost it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import cast

from redis.asyncio import Redis

RELEASED = b"released"


def _key(cluster: str) -> str:
    return f"paceline:{cluster}:pins"


async def write_pins(client: Redis, cluster: str, pins: Mapping[str, int]) -> None:
    """Tell the planner to keep so many workers of each of these roles. Raises RedisError."""
    await cast(Awaitable[int], client.hset(_key(cluster), mapping={role: str(count) for role, count in pins.items()}))


async def release_pins(client: Redis, cluster: str, roles: Iterable[str]) -> None:
    """Tell the planner that it may scale these roles again. Raises RedisError."""
    await cast(Awaitable[int], client.hset(_key(cluster), mapping=dict.fromkeys(roles, RELEASED)))


class Pins:
    """The planner's memory of what people have set."""

    def __init__(self, client: Redis, cluster: str) -> None:
        self._client = client
        self._cluster = cluster
        self.now: dict[str, int] = {}
        """Number of workers by role."""

    def add(self, pins: Mapping[str, int]) -> None:
        """Take in what people have changed at the platform itself."""
        self.now |= pins

    async def read(self) -> None:
        """Bring `now` and Redis up to date with each other. Raises RedisError."""
        key = _key(self._cluster)
        found = await cast(Awaitable[dict[bytes, bytes]], self._client.hgetall(key))
        for role, value in ((role.decode(errors="replace"), value) for role, value in found.items()):
            if value.isdigit():
                self.now[role] = int(value)
            else:
                self.now.pop(role, None)
                await cast(Awaitable[int], self._client.hdel(key, role))
        for role, count in self.now.items():
            if role.encode() not in found:
                # Not if a gateway has written meanwhile.
                await cast(Awaitable[int], self._client.hsetnx(key, role, str(count)))
