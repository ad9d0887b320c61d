"""A log in Redis of the workers that run each request, for people and tools. It never delays or fails a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.services.common.tasks import end_tasks

TTL_SECONDS = 600
_BUFFER = 1000
"""Largest number of entries that wait to be written. Further entries are dropped."""

log = logging.getLogger(__name__)


class PlacementLog:
    """Writes the keys `paceline:{cluster}:request:{id}`. Entries that Redis does not accept in time are dropped."""

    def __init__(self, redis: Redis, cluster: str) -> None:
        self._redis = redis
        self._prefix = f"paceline:{cluster}:request:"
        # Any, because mypy accepts no dict for the mapping type that redis-py declares.
        self._entries: asyncio.Queue[tuple[str, dict[Any, Any]]] = asyncio.Queue(_BUFFER)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)

    def put(self, request_id: str, prefill: str, decode: str, attempt: int) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self._entries.put_nowait((request_id, {"prefill": prefill, "decode": decode, "attempt": attempt}))

    async def _run(self) -> None:
        while True:
            entries = [await self._entries.get()]
            while not self._entries.empty():
                entries.append(self._entries.get_nowait())
            try:
                async with asyncio.timeout(1.0), self._redis.pipeline(transaction=False) as pipeline:
                    for request_id, fields in entries:
                        pipeline.hset(self._prefix + request_id, mapping=fields)
                        pipeline.expire(self._prefix + request_id, TTL_SECONDS)
                    await pipeline.execute()
            except (RedisError, OSError, TimeoutError) as error:
                log.debug("%d placements were not written: %s", len(entries), error)
