"""A stand-in for the kvtransfer service of a host: it notes the blocks that its workers have computed, and tells
gateways about them as a real service does. There is no memory behind it.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import grpc.aio

from paceline.core.block_pool import BlockEvent
from paceline.core.context import HASH_BYTES, Context
from paceline.core.kv_layout import BASE_TOKENS
from paceline.proto import common_pb2, kvtransfer_pb2, kvtransfer_pb2_grpc
from paceline.proto.fleet_pb2 import HostReport
from paceline.services.common.credentials import Credentials
from paceline.services.common.member_signatures import UNSIGNED
from paceline.services.common.registry import Member, Registrar
from paceline.services.common.rpc import RpcServer
from paceline.services.common.streams import BlockBatch
from paceline.services.kvtransfer.events import BlockEventPublisher

FINGERPRINT = "stand-in"
LAYOUT = kvtransfer_pb2.KVLayout(
    fingerprint=FINGERPRINT,
    slot_bytes=4096,
    base_tokens=BASE_TOKENS,
    groups=[kvtransfer_pb2.KVGroup(name="kv", block_tokens=BASE_TOKENS)],
)
_NAMES = 4096
"""Names in one message."""


class StandInHost(kvtransfer_pb2_grpc.KVTransferServicer):
    """A stand-in for one host.

    Args:
        capacity: blocks that the host holds.
        blocks: number of blocks that are cached from the beginning, with contexts that nobody requests.
    """

    def __init__(self, name: str, capacity: int = 8192, blocks: int = 0) -> None:
        self.name = name
        names = random.Random(name)
        self._blocks = OrderedDict[bytes, None].fromkeys(names.randbytes(HASH_BYTES) for _ in range(blocks))
        self._capacity = capacity
        self._events: list[BlockEvent] = []
        self._next_event = blocks
        self._epoch = time.time_ns()
        self._rpc = RpcServer("127.0.0.1", 0, Credentials(), name)
        self._port = 0
        self._undo: list[Any] = []

    async def start(self, redis: str, cluster: str) -> None:
        kvtransfer_pb2_grpc.add_KVTransferServicer_to_server(self, self._rpc.server)
        self._port = await self._rpc.start()
        await self._rpc.set_ready(True)
        registrar = Registrar(redis, cluster, self._describe, UNSIGNED)
        publisher = BlockEventPublisher(redis, cluster, self._take_events)
        await registrar.start()
        await publisher.start()
        self._undo = [registrar, publisher]

    async def stop(self) -> None:
        for each in self._undo:
            await each.stop()
        await self._rpc.close(0)

    def cached_tokens(self, work: common_pb2.Work) -> int:
        """Return the number of a context's tokens that are cached."""
        cached = 0
        for name in self._names(work):
            if name not in self._blocks:
                break
            self._blocks.move_to_end(name)
            cached += BASE_TOKENS
        return min(cached, (len(work.token_ids) - 1) // BASE_TOKENS * BASE_TOKENS)

    def store(self, work: common_pb2.Work) -> None:
        """Cache a context. The blocks that were used least recently make room."""
        new = [name for name in self._names(work) if name not in self._blocks]
        self._blocks.update(dict.fromkeys(new))
        gone = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._capacity)]
        self._events += _events("stored", new) + _events("removed", gone)

    def _names(self, work: common_pb2.Work) -> Iterable[bytes]:
        return Context(work.token_ids, work.cache_salt).links(FINGERPRINT)

    def _take_events(self) -> BlockBatch | None:
        events, self._events = self._events, []
        first, self._next_event = self._next_event, self._next_event + len(events)
        return BlockBatch(self.name, self.name, first, tuple(events)) if events else None

    def _describe(self) -> Member:
        report = HostReport(next_block_event=self._next_event, blocks=self._capacity)
        return Member(
            self.name, "kvtransfer", self._epoch, f"127.0.0.1:{self._port}", self.name, layout=FINGERPRINT, host=report
        )

    async def Reusable(  # type: ignore[override]
        self, request: kvtransfer_pb2.ReusableRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        # The list contains the events that nobody has taken yet. That they follow all the same does no harm.
        pool, names = kvtransfer_pb2.Pool(id=self.name, next_event=self._next_event, layout=LAYOUT), list(self._blocks)
        await context.write(kvtransfer_pb2.ReusableReply(pool=pool))
        for start in range(0, len(names), _NAMES):
            hashes = b"".join(names[start : start + _NAMES])
            await context.write(kvtransfer_pb2.ReusableReply(names=kvtransfer_pb2.BlockNames(group=0, hashes=hashes)))


def _events(op: str, names: Iterable[bytes]) -> list[BlockEvent]:
    return [BlockEvent(op, 0, name) for name in names]  # type: ignore[arg-type]
