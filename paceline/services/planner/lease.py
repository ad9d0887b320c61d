"""The lease in Redis by which one planner of a cluster acts at a time.

It saves work and noise. The fleet's safety does not depend on it: actions name the state to reach, so two planners that
act at the same time do no harm.
"""

from __future__ import annotations

import asyncio
import time

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError, WatchError

from paceline.services.common.auth import CLOCK_SECONDS
from paceline.services.common.seals import Seal, read_values

SECONDS = 10.0
"""Seconds for which a lease is valid. If its holder ends without a release, another planner gets it after this time."""
MARGIN_SECONDS = 2.0
"""Seconds before the end of its lease at which the holder stops acting, because a call to the platform takes time."""
_OLDEST_SECONDS = SECONDS + CLOCK_SECONDS
"""Largest age of another planner's lease, by our clock. Redis removes an older one, so somebody has written it back."""


def lease_key(cluster: str) -> str:
    """Return the Redis key of a cluster's lease."""
    return f"paceline:{cluster}:planner"


class LeaderLease:
    """One planner's claim to the lease of its cluster.

    Args:
        holder: name of this planner, unique among all planners that ever run.
    """

    def __init__(self, client: Redis, cluster: str, seal: Seal, holder: str) -> None:
        self._client = client
        self._key = lease_key(cluster)
        self._seal = seal
        self._holder = holder.encode()
        self._until = 0.0

    @property
    def is_held(self) -> bool:
        """Whether this planner has the lease and may act now."""
        return time.monotonic() < self._until

    async def renew(self) -> bool:
        """Take the lease if nobody has it, or extend it. Return whether this planner has the lease now.

        Raises RedisError or OSError if Redis does not answer. A lease that is held then ends by itself.
        """
        asked = time.monotonic()
        try:
            async with self._client.pipeline(transaction=True) as pipeline:
                has_it = await self._write(pipeline)
        except WatchError:  # another planner was faster
            has_it = False
        self._until = asked + SECONDS - MARGIN_SECONDS if has_it else 0.0
        return has_it

    async def _write(self, pipeline: Pipeline) -> bool:
        await pipeline.watch(self._key)
        if await self._read(pipeline) not in (None, self._holder):
            return False
        pipeline.multi()  # type: ignore[no-untyped-call]
        pipeline.set(self._key, self._seal.close(self._key, self._holder), px=int(SECONDS * 1000))
        await pipeline.execute()
        return True

    async def _read(self, pipeline: Pipeline) -> bytes | None:
        """Return the name of the planner that has the lease; None if no planner has it."""
        (sealed,) = await read_values(pipeline, [self._key])
        opened = self._seal.open(self._key, sealed)
        return opened.value if opened is not None and abs(opened.age_seconds) <= _OLDEST_SECONDS else None

    async def release(self) -> None:
        """Give the lease up, so that another planner can act at once. Errors are ignored, because the lease ends
        anyway.
        """
        was_held, self._until = self.is_held, 0.0
        if not was_held:
            return
        try:
            async with asyncio.timeout(1.0), self._client.pipeline(transaction=True) as pipeline:
                await pipeline.watch(self._key)
                if await self._read(pipeline) == self._holder:
                    pipeline.multi()  # type: ignore[no-untyped-call]
                    pipeline.delete(self._key)
                    await pipeline.execute()
        except (RedisError, OSError, TimeoutError):
            pass
