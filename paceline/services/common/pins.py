"""Numbers of workers that people have fixed for roles, in Redis: gateways write them, and the planner obeys them.

The planner remembers these numbers, and writes them to Redis again if Redis has lost them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import cast

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from paceline.core.planner.reports import ROLES, Role

RELEASED = b"released"


def _key(cluster: str) -> str:
    return f"paceline:{cluster}:pins"


def is_count(value: bytes) -> bool:
    """Return whether a value from Redis is a valid number of workers. Other programs can write to Redis, too."""
    return value.isdigit() and len(value) < 7


async def write_pins(client: Redis, cluster: str, pins: Mapping[Role, int]) -> None:
    """Tell the planner, by way of Redis, to keep these numbers of workers, by role. Raises RedisError."""
    await client.hset(_key(cluster), mapping={str(role): count for role, count in pins.items()})


async def release_pins(client: Redis, cluster: str, roles: Iterable[Role]) -> None:
    """Tell the planner, by way of Redis, that it may scale these roles again. Raises RedisError."""
    await client.hset(_key(cluster), mapping=dict.fromkeys(roles, RELEASED))


class Pins:
    """The planner's copy of the numbers of workers that people have fixed."""

    def __init__(self, client: Redis, cluster: str) -> None:
        self._client = client
        self._cluster = cluster
        self.now: dict[Role, int] = {}
        """Number of workers by role."""

    async def replace(self, pins: Mapping[Role, int]) -> None:
        """Write numbers to Redis that people have changed at the platform itself, by role. Raises RedisError.

        A number that a gateway has written since the last `read` is newer and stays.
        """
        key = _key(self._cluster)
        known = {role: str(count).encode() for role, count in self.now.items()}

        async def write(pipeline: Pipeline) -> None:
            found = await cast(Awaitable[dict[bytes, bytes]], pipeline.hgetall(key))
            # A release is written, too. A missing field was never written, or Redis has lost it.
            newer = {role for role in pins if found.get(role.encode()) not in (None, known.get(role))}
            pipeline.multi()  # type: ignore[no-untyped-call]
            for role in pins.keys() - newer:
                pipeline.hset(key, role, str(pins[role]))

        await self._client.transaction(write, key)

    async def read(self) -> None:
        """Update `now` from Redis, and write numbers that Redis has lost. Raises RedisError."""
        key = _key(self._cluster)
        found = await cast(Awaitable[dict[bytes, bytes]], self._client.hgetall(key))
        for role in ROLES:
            if (value := found.get(role.encode())) is None:
                continue
            if is_count(value):
                self.now[role] = int(value)
            else:
                self.now.pop(role, None)
                await self._client.hdel(key, role)
        for role, count in self.now.items():
            if role.encode() not in found:
                # It is not written if a gateway has written meanwhile.
                await self._client.hsetnx(key, role, str(count))
