"""Tells Redis which blocks this host holds: a stream that will be read by routing by cached prefix.

It is a hint: it may be lost, and nobody waits for it. The stream is bounded (Redis trims it to about the newest
_STREAM_LENGTH entries as it is written), and so is what waits here for a Redis that does not answer. A block costs one
entry when it becomes reusable and one when it is evicted; a host where neither happens sends nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence

import redis.asyncio as redis
from redis.exceptions import RedisError

from paceline.core.block_pool import BlockEvent
from paceline.services.common.registry import connect
from paceline.services.common.tasks import end_tasks

_PERIOD_SECONDS = 0.1
_DEADLINE_SECONDS = 2.0
_MAX_PAUSE_SECONDS = 5.0
_BATCH = 1000
_BUFFERED = 100_000
_STREAM_LENGTH = 100_000

log = logging.getLogger(__name__)


def blocks_stream(cluster: str) -> str:
    """Key of the Redis stream; its entries are {host, op: stored or removed, group, hash in hexadecimal}."""
    return f"paceline:{cluster}:blocks"


class BlockEventPublisher:
    """Moves block events to the cluster's stream, from `start` to `stop`.

    While Redis does not answer, events wait in a bounded buffer that drops its oldest.

    Args:
        take_events: gives the events since it was last called.
        buffered: events that may wait.
    """

    def __init__(
        self,
        url: str,
        cluster: str,
        host_id: str,
        take_events: Callable[[], list[BlockEvent]],
        buffered: int = _BUFFERED,
    ) -> None:
        self._client: redis.Redis = connect(url)
        self._stream = blocks_stream(cluster)
        self._host_id = host_id
        self._take_events = take_events
        self._waiting: deque[BlockEvent] = deque(maxlen=buffered)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="block events")

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
        await self._client.aclose()

    async def _run(self) -> None:
        failures = 0
        while True:
            pause = min(_MAX_PAUSE_SECONDS, _PERIOD_SECONDS * 2**failures) * random.uniform(0.8, 1.2)
            await asyncio.sleep(pause)
            self._waiting.extend(self._take_events())
            try:
                await self._publish()
                if failures:
                    log.info("Redis takes block events again")
                failures = 0
            except (RedisError, OSError, TimeoutError) as error:
                if not failures:
                    log.warning("Redis does not take block events (%s); going on without it", error)
                failures = min(failures + 1, 10)

    async def _publish(self) -> None:
        while self._waiting:
            # Copied, not popped: what fails is sent again, and an event twice does no harm.
            batch = [self._waiting[index] for index in range(min(_BATCH, len(self._waiting)))]
            async with asyncio.timeout(_DEADLINE_SECONDS):
                await self._send(batch)
            for _ in batch:
                self._waiting.popleft()

    async def _send(self, batch: Sequence[BlockEvent]) -> None:
        async with self._client.pipeline(transaction=False) as pipeline:
            for event in batch:
                entry = {"host": self._host_id, "op": event.op, "group": event.group, "hash": event.hash.hex()}
                pipeline.xadd(self._stream, entry, maxlen=_STREAM_LENGTH, approximate=True)  # type: ignore[arg-type]
            await pipeline.execute()
