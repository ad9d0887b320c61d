"""Keeps the prefix index up to date with the caches of the hosts.

The feed reads the hosts' block events from Redis. If a host is new, or if events were missed, the feed asks the host
itself for all of its blocks. Redis may be flushed, trimmed or unreachable, and a host or this gateway may restart. Each
of these faults shows as a gap in the numbers of a host's events, or as an event number in the host's heartbeat that
this gateway has not reached.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import cast

import grpc.aio
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.core.context import HASH_BYTES
from paceline.core.errors import InvalidRequestError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.layout import layout_from_pb
from paceline.services.common.secret import Secret
from paceline.services.common.streams import BlockBatch, Entry, block_keys, blocks_stream, comes_before, newest_id
from paceline.services.common.tasks import end_tasks, heeding_cancellation
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.routing.prefix_index import IndexedBlocks, PrefixIndex

_WATCH_SECONDS = 0.5
_ASK_SECONDS = 1.0
"""Shortest interval between two calls that ask the same host for its blocks, in seconds."""
_ANSWER_SECONDS = 5.0
_ASKED = 8
"""Largest number of hosts that are asked at a time. It is small, because each host answers with all of its blocks."""
_BLOCK_MS = 500
_PAUSE_SECONDS = 0.1
"""Pause between two reads of the stream, in seconds, so that one read returns many events of a large fleet."""
_READ = 100
"""Largest number of stream entries that one read returns."""
_LATE = 100
"""Largest number of a host's batches that are kept while the host is asked for its blocks. Beyond it, the oldest are
dropped."""

_NO_SECRET = Secret()

log = logging.getLogger(__name__)


class _Following:
    """The state of the feed for one host."""

    def __init__(self, epoch: int, told: int) -> None:
        self.epoch = epoch
        self.told = told
        """Number of the host's next block event, as its newest heartbeat says."""
        self.asked = -_ASK_SECONDS
        """Instant at which the host was last asked for its blocks, on time.monotonic()."""
        self.asking: asyncio.Task[None] | None = None
        self.doubtful = False
        """Whether the index may be wrong about the host, so that the host has to be asked."""


class BlockFeed:
    """Keeps the prefix index up to date, from `start` to `close`.

    Args:
        redis: a Redis client whose reads may block for half a second.
        hosts: a function that returns the kvtransfer services that are known now.
        secret: the secret of the cluster. If it is not empty, events without a hash that is made with it are ignored.
    """

    def __init__(
        self,
        redis: Redis,
        cluster: str,
        hosts: Callable[[], Iterable[RemoteWorker]],
        index: PrefixIndex,
        secret: Secret = _NO_SECRET,
    ) -> None:
        self._redis = redis
        self._stream = blocks_stream(cluster)
        self._keys = block_keys(secret, cluster)
        self._hosts = hosts
        self._index = index
        self._following: dict[str, _Following] = {}
        self._late: defaultdict[str, deque[BlockBatch]] = defaultdict(lambda: deque(maxlen=_LATE))
        """Batches that have come while a host is being asked, by host id. They are applied after the host's answer."""
        self._asks = asyncio.Semaphore(_ASKED)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._read(), name="block feed"),
            asyncio.create_task(self._watch(), name="block feed watch"),
        ]

    async def close(self) -> None:
        asking = (following.asking for following in self._following.values())
        await end_tasks(*self._tasks, *(task for task in asking if task is not None))

    # ---- the stream

    async def _read(self) -> None:
        last = b""
        while True:
            try:
                # Events up to the newest entry are covered by asking the hosts.
                last = last or await newest_id(self._redis, self._stream)
                entries = await self._behind(last)
                for batch in (BlockBatch.from_entry(entry, self._keys) for _, entry in entries):
                    if batch is not None:
                        self._take(batch)
                if entries:
                    last = entries[-1][0]
                elif comes_before(await newest_id(self._redis, self._stream), last):
                    last = b"0-0"  # the stream has begun again, with smaller ids
                if 0 < len(entries) < _READ:
                    await asyncio.sleep(_PAUSE_SECONDS)
            except (RedisError, OSError, TimeoutError):
                # The fleet logs that Redis does not answer. Events that are missed meanwhile show as a gap.
                await asyncio.sleep(_WATCH_SECONDS * random.uniform(0.8, 1.2))

    async def _behind(self, last: bytes) -> list[Entry]:
        """Return the entries after the entry `last`. If there are none, wait up to half a second for new entries."""
        reply = await self._redis.xread({self._stream: last}, count=_READ, block=_BLOCK_MS)
        streams = cast(list[tuple[bytes, list[Entry]]], reply or [])
        return [entry for _, entries in streams for entry in entries]

    def _take(self, batch: BlockBatch) -> None:
        following = self._following.get(batch.host_id)
        if following is None:
            return  # an unknown host; if it is a member, `_read_heartbeats` asks it
        if following.asking is not None:
            self._late[batch.host_id].append(batch)
        elif not self._index.apply(batch):
            following.doubtful = True

    # ---- the hosts

    async def _watch(self) -> None:
        while True:
            self._read_heartbeats()
            await asyncio.sleep(_WATCH_SECONDS * random.uniform(0.8, 1.2))

    def _read_heartbeats(self) -> None:
        """Forget hosts that are gone. Ask new hosts for their blocks, and hosts whose events have been missed."""
        known = {host.member.host_id: host for host in self._hosts() if not host.is_shut_out}
        for name in [name for name in self._following if name not in known]:
            self._forget(name)
        now = time.monotonic()
        for name, host in known.items():
            told = host.member.host.next_block_event
            if name in self._following and self._following[name].epoch != host.member.epoch:
                self._forget(name)
            following = self._following.setdefault(name, _Following(host.member.epoch, told))
            # A heartbeat may arrive before the events that it counts, so compare with the last heartbeat.
            blocks = self._index.host(name)
            following.doubtful |= following.told > (0 if blocks is None else blocks.next_event)
            following.told = told
            if following.doubtful and following.asking is None and now >= following.asked + _ASK_SECONDS:
                following.asked, following.doubtful = now, False
                following.asking = asyncio.create_task(
                    self._ask(name, following, host.channel), name=f"blocks of {name}"
                )

    def _forget(self, name: str) -> None:
        if (task := self._following.pop(name).asking) is not None:
            task.cancel()
        self._index.forget(name)
        self._late.pop(name, None)

    async def _ask(self, name: str, following: _Following, channel: grpc.aio.Channel) -> None:
        try:
            async with self._asks, asyncio.timeout(_ANSWER_SECONDS):
                blocks = await _reusable(channel)
            if blocks is None:
                self._index.forget(name)
                return
            self._index.replace(name, blocks)
            log.debug("host %s has %d blocks that can be reused", name, len(blocks))
            for batch in self._late.pop(name, ()):
                following.doubtful |= not self._index.apply(batch)
        except (grpc.aio.AioRpcError, InvalidRequestError, TimeoutError, ValueError) as error:
            log.debug("cannot read the list of blocks of host %s: %s", name, error)
            following.doubtful = True
        finally:
            self._late.pop(name, None)
            following.asking = None


async def _reusable(channel: grpc.aio.Channel) -> IndexedBlocks | None:
    """Return the reusable blocks of a host; None if it has no arena yet.

    Raises AioRpcError, InvalidRequestError or ValueError if the host cannot be asked or its answer is not valid.
    """
    call = pb_grpc.KVTransferStub(channel).Reusable(pb.ReusableRequest(), timeout=_ANSWER_SECONDS)
    pool: pb.Pool | None = None
    names: list[list[bytes]] = []
    while isinstance(reply := await heeding_cancellation(call.read()), pb.ReusableReply):
        if pool is None:
            pool = reply.pool
            if not pool.id:
                return None
            names = [[] for _ in layout_from_pb(pool.layout).all_groups]
            continue
        hashes, group = reply.names.hashes, reply.names.group
        if group >= len(names):
            raise ValueError(f"there is no group {group}")
        names[group] += [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
    if pool is None:
        raise ValueError("the answer is empty")
    return IndexedBlocks(pool.id, pool.next_event, layout_from_pb(pool.layout), names)
