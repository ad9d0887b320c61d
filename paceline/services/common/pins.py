"""Numbers of workers that people have fixed for roles, in Redis: gateways write them, and the planner obeys them.

The planner remembers these numbers, and writes them to Redis again if Redis has lost them, or if others have changed
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from paceline.core.planner.reports import ROLES, Role
from paceline.services.common.seals import Opened, Seal, read_values

RELEASED = b"released"


def pin_key(cluster: str, role: Role) -> str:
    """Return the Redis key of the number that people have fixed for a role."""
    return f"paceline:{cluster}:pin:{role}"


def is_count(value: bytes) -> bool:
    """Return whether a value from Redis is a valid number of workers. Other programs can write to Redis, too."""
    return value.isdigit() and len(value) < 7


async def write_pins(client: Redis, cluster: str, seal: Seal, pins: Mapping[Role, int | None]) -> None:
    """Tell the planner, by way of Redis, to keep these numbers of workers, by role. Raises RedisError.

    Args:
        pins: number of workers by role; None if the planner may scale the role again.
    """
    keys = {role: pin_key(cluster, role) for role in pins}
    found = await read_values(client, keys.values())
    values = {}
    for (role, key), sealed in zip(keys.items(), found, strict=True):
        # Later than what is there, even if another gateway with another clock has written it.
        known = seal.open(key, sealed)
        values[key] = seal.close(key, _text(pins[role]), known.stamp if known else 0)
    await client.mset(values)


class Pins:
    """The planner's copy of the numbers of workers that people have fixed."""

    def __init__(self, client: Redis, cluster: str, seal: Seal) -> None:
        self._client = client
        self._seal = seal
        self._keys: dict[Role, str] = {role: pin_key(cluster, role) for role in ROLES}
        self._newest: dict[Role, Opened] = {}
        """The newest value of each role that was read. An older one that stands in Redis later was written back by
        somebody who lacks the secret."""
        self._sealed: dict[Role, bytes] = {}
        """The same with its seal."""

    @property
    def now(self) -> dict[Role, int]:
        """Number of workers by role."""
        return {role: int(opened.value) for role, opened in self._newest.items() if is_count(opened.value)}

    async def replace(self, pins: Mapping[Role, int]) -> None:
        """Write numbers to Redis that people have changed at the platform itself, by role. Raises RedisError.

        A number that a gateway has written since the last `read` is newer and stays.
        """
        await self._write(
            {role: self._seal.close(self._keys[role], _text(count), self._stamp(role)) for role, count in pins.items()}
        )

    async def read(self) -> None:
        """Update `now` from Redis, and write numbers that Redis has lost. Raises RedisError."""
        found = await read_values(self._client, self._keys.values())
        lost = {}
        for (role, key), sealed in zip(self._keys.items(), found, strict=True):
            opened = self._seal.open(key, sealed)
            if sealed is not None and opened is not None and opened.stamp >= self._stamp(role):
                self._newest[role], self._sealed[role] = opened, sealed
            elif role in self._sealed:
                lost[role] = self._sealed[role]
        if lost:
            await self._write(lost)

    async def _write(self, values: Mapping[Role, bytes]) -> None:
        """Write sealed values, except where somebody has written a newer one since the last `read`."""
        keys = {role: self._keys[role] for role in values}

        async def write(pipeline: Pipeline) -> None:
            found = await read_values(pipeline, keys.values())
            pipeline.multi()  # type: ignore[no-untyped-call]
            for (role, key), sealed in zip(keys.items(), found, strict=True):
                opened = self._seal.open(key, sealed)
                if opened is None or opened.stamp <= self._stamp(role):
                    pipeline.set(key, values[role])

        await self._client.transaction(write, *keys.values())

    def _stamp(self, role: Role) -> int:
        return self._newest[role].stamp if role in self._newest else 0


def _text(count: int | None) -> bytes:
    return RELEASED if count is None else str(count).encode()
