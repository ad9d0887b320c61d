"""Membership in Redis: who is alive, in which role, how loaded. A hint that may be lost at any time, never the truth.

Each service writes one key with a time-to-live and renews it; the value carries its epoch, so that a restart under the
same name is seen as somebody new. Nothing else refers to the key, so a flush heals with the next heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Literal

import redis.asyncio as redis
from redis.exceptions import RedisError

HEARTBEAT_SECONDS = 0.5
TTL_SECONDS = 3.0

Role = Literal["gateway", "prefill", "decode", "kvtransfer"]
State = Literal["ready", "draining"]

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One live service and its load."""

    worker_id: str
    role: Role
    epoch: int
    """Grows with every start of the service."""
    address: str
    """host:port of its gRPC (gateway: HTTP) server."""
    host_id: str
    """kvtransfer instance whose arena it uses; equal for two workers means a handoff moves no bytes."""
    state: State = "ready"
    model: str = ""
    """KV layout fingerprint; workers may hand over only where it is equal."""
    max_model_len: int = 0
    max_seqs: int = 0
    running: int = 0
    waiting: int = 0
    stats: dict[str, float] = dataclasses.field(default_factory=dict)
    """Counters and gauges for /metrics and /fleet."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Member | None:
        """None for what another version or a stranger wrote."""
        try:
            return Member(**json.loads(text))
        except (ValueError, TypeError):
            return None


def connect(url: str) -> redis.Redis:
    """A client whose every call ends soon, so that a dead Redis delays nobody."""
    client: redis.Redis = redis.Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0)
    return client


def _prefix(cluster: str) -> str:
    return f"paceline:{cluster}:member:"


async def read_members(client: redis.Redis, cluster: str) -> list[Member]:
    """All members that Redis knows now. Raises RedisError."""
    keys = [key async for key in client.scan_iter(match=_prefix(cluster) + "*", count=1000)]
    values = await client.mget(keys) if keys else []
    members = (Member.from_json(value) for value in values if value is not None)
    return sorted((member for member in members if member is not None), key=lambda member: member.worker_id)


class Registrar:
    """Keeps one member in Redis from `start` to `stop`."""

    def __init__(self, url: str, cluster: str, describe: Callable[[], Member]) -> None:
        self._client = connect(url)
        self._key_prefix = _prefix(cluster)
        self._describe = describe
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._beat(), name="registrar")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        with contextlib.suppress(RedisError, OSError):
            await self._client.delete(self._key_prefix + self._describe().worker_id)
        await self._client.aclose()

    def announce(self) -> None:
        """Writes the member now rather than with the next heartbeat, for instance because it begins to drain."""
        self._wake.set()

    async def _beat(self) -> None:
        reachable = True
        while True:
            try:
                member = self._describe()
                key = self._key_prefix + member.worker_id
                await self._client.set(key, member.to_json(), px=int(TTL_SECONDS * 1000))
                if not reachable:
                    log.info("Redis answers again")
                reachable = True
            except (RedisError, OSError) as error:
                if reachable:
                    log.warning("Redis does not answer (%s); going on without it", error)
                reachable = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
