"""Notices about sequences: hints for the hosts that cache their contexts, and a log in Redis of their workers.

The log is for people and tools. A notice never delays or fails a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc.aio
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.core.cache_policy.hints import Hint
from paceline.core.context import Context
from paceline.core.kv_layout import BASE_TOKENS
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.tasks import end_tasks, is_cancelled
from paceline.services.gateway.fleet.remote_worker import RemoteWorker

ANSWER_SECONDS = 2.0
"""Deadline of a message with hints, in seconds. Later hints for the same host wait for its end and are sent in the next
message."""
MOST_WAITING = 4096
"""Largest number of contexts whose hints wait to be sent to a host. Beyond it, the oldest hints are dropped: losing a
hint does no harm but a cache miss."""
MOST_WAITING_BYTES = 16 << 20
"""Largest total size of the hashes of contexts that wait for one host, in bytes. There is a hash for each token. Hosts
accept a message of this size."""

log = logging.getLogger(__name__)


class WaitingHints:
    """Hints that wait to be sent to one host."""

    def __init__(self) -> None:
        self.expectations: deque[pb.Expectation] = deque()
        self._bytes = 0

    def add(self, expectation: pb.Expectation) -> None:
        self.expectations.append(expectation)
        self._bytes += len(expectation.hashes)
        while len(self.expectations) > MOST_WAITING or self._bytes > MOST_WAITING_BYTES:
            self._bytes -= len(self.expectations.popleft().hashes)


class HintSender:
    """Sends hints in batches, until `close`. A host that does not answer does not delay hints for other hosts.

    Args:
        host: a function that returns the kvtransfer service of a host by its id; None if the host is not known.
    """

    def __init__(self, host: Callable[[str], RemoteWorker | None]) -> None:
        self._host = host
        self._waiting: defaultdict[str, WaitingHints] = defaultdict(WaitingHints)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The task that sends hints to a host, by host id, while there are hints for the host."""
        self._is_closed = False

    async def close(self) -> None:
        """Drop all hints that were not sent. Hints that are queued after this are dropped, too."""
        self._is_closed = True
        await end_tasks(*self._tasks.values())

    def put(self, layouts: Mapping[str, str], context: Context, hints: Sequence[Hint]) -> None:
        """Queue hints about a context.

        Args:
            layouts: the hosts that get the hints, by their ids, with the fingerprint of each host's KV layout.
        """
        most = max((hint.tokens for hint in hints), default=0) // BASE_TOKENS
        for host_id, layout in layouts.items() if most and not self._is_closed else ():
            hashes = b"".join(context.links(layout)[:most])
            self._waiting[host_id].add(pb.Expectation(hashes=hashes, hints=map(_hint_to_pb, hints)))
            if host_id not in self._tasks:
                # At once: if the next request is faster than the hints, it may evict their blocks.
                self._tasks[host_id] = asyncio.create_task(self._send_all(host_id), name="hint sender")

    async def _send_all(self, host_id: str) -> None:
        """Send the hints for a host until none wait."""
        try:
            while (waiting := self._waiting.pop(host_id, None)) is not None:
                await self._send(host_id, waiting.expectations)
        finally:
            del self._tasks[host_id]

    async def _send(self, host_id: str, expected: Iterable[pb.Expectation]) -> None:
        if (host := self._host(host_id)) is None:
            return
        try:
            stub = pb_grpc.KVTransferStub(host.channel)
            await stub.Expect(pb.ExpectRequest(expectations=expected), timeout=ANSWER_SECONDS)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:  # the latter if the channel is closed
            log.debug("hints were not sent to %s: %s", host, error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise  # otherwise the gateway has closed the channel of a host that leaves


def _hint_to_pb(hint: Hint) -> pb.Hint:
    return pb.Hint(tokens=hint.tokens, within_ms=round(hint.seconds * 1000), source=hint.source)


TTL_SECONDS = 600
_BUFFER = 1000
"""Largest number of entries that wait to be written. Further entries are dropped."""


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
