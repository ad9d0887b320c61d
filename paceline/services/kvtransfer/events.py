"""Publishes the cached blocks of this host to Redis, so that gateways can route requests by cached prefix.

Redis keeps the entries of about the last _KEPT_SECONDS. If Redis does not answer, a bounded number of events
waits here. The events of _PERIOD_SECONDS share entries of up to _BATCH events; if there are no events, nothing is sent.
A gateway that missed events asks the service for the names of all blocks (`KVTransfer.Reusable`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import cast

import redis.asyncio as redis
from redis.exceptions import RedisError, ResponseError

from paceline.core.block_pool import BlockEvent
from paceline.services.common.registry import connect
from paceline.services.common.secret import Secret
from paceline.services.common.streams import BlockBatch, block_keys, blocks_stream, oldest_kept, remove_unusable
from paceline.services.common.tasks import end_tasks

_PERIOD_SECONDS = 0.25
_DEADLINE_SECONDS = 2.0
_MAX_PAUSE_SECONDS = 5.0
_BATCH = 1000
_BUFFERED = 100_000
_KEPT_SECONDS = 60.0
"""Age up to which the stream keeps events, in seconds. A gateway that reads later asks the service for its blocks."""

_NO_SECRET = Secret()

log = logging.getLogger(__name__)


class BlockEventPublisher:
    """Writes block events to the cluster's stream, from `start` to `stop`.

    While Redis does not answer, events wait in a bounded buffer. If it is full, the oldest events are dropped.

    Args:
        url: URL of Redis.
        cluster: name of the cluster, which is in the name of the stream.
        take_events: returns the events since its last call; None if there are none.
        buffered: largest number of events that may wait while Redis does not answer.
        secret: the secret of the cluster.
    """

    def __init__(
        self,
        url: str,
        cluster: str,
        take_events: Callable[[], BlockBatch | None],
        buffered: int = _BUFFERED,
        secret: Secret = _NO_SECRET,
    ) -> None:
        self._client: redis.Redis = connect(url)
        self._stream = blocks_stream(cluster)
        self._take_events = take_events
        self._key = next(iter(block_keys(secret, cluster)), b"")
        self._waiting: deque[tuple[BlockBatch, int, BlockEvent]] = deque(maxlen=buffered)
        """Waiting events: (the batch with which the event came, its number, the event)."""
        self._newest = b""
        """Id of the newest entry that this publisher has written."""
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
            if (taken := self._take_events()) is not None:
                self._waiting.extend((taken, number, event) for number, event in enumerate(taken.events, taken.first))
            try:
                await self._publish()
                if failures:
                    log.info("Redis accepts block events again")
                failures = 0
            except (RedisError, OSError, TimeoutError) as error:
                if not failures:
                    log.warning("cannot write block events to Redis (%s); going on without it", error)
                failures = min(failures + 1, 10)

    async def _publish(self) -> None:
        while self._waiting:
            # Events stay in the buffer until Redis has them, so a failed write is repeated. A reader recognizes
            # repeated events by their numbers.
            batch = self._next_batch()
            async with asyncio.timeout(_DEADLINE_SECONDS):
                entry, minid = batch.to_entry(self._key), oldest_kept(self._newest, _KEPT_SECONDS)
                try:
                    added = await self._client.xadd(self._stream, entry, minid=minid, approximate=True)  # type: ignore[arg-type]
                except ResponseError as error:
                    await remove_unusable(self._client, self._stream, error)
                    self._newest = b""
                    raise
                self._newest = cast(bytes, added)
            for _ in batch.events:
                self._waiting.popleft()

    def _next_batch(self) -> BlockBatch:
        """Return the oldest waiting events that are of one pool and have consecutive numbers, _BATCH at most."""
        taken, first, _ = self._waiting[0]
        run = itertools.takewhile(
            lambda entry: entry[1][0].pool == taken.pool and entry[1][1] == first + entry[0],
            enumerate(itertools.islice(self._waiting, _BATCH)),
        )
        return BlockBatch(taken.host_id, taken.pool, first, tuple(event for _, (_, _, event) in run))
