"""The KV memory of a host: the arena, its ledger, and the ways in and out of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.lru import LRU
from paceline.core.kv_layout import KVLayout
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.secret import Secret
from paceline.services.common.shared_memory import map_arena
from paceline.services.kvtransfer.adoptions import Adoptions
from paceline.services.kvtransfer.arena import Arena
from paceline.services.kvtransfer.awake_clock import AwakeClock
from paceline.services.kvtransfer.channels import Channels
from paceline.services.kvtransfer.disk_tier import DiskOptions, DiskTier, Promotions
from paceline.services.kvtransfer.exports import Exports
from paceline.services.kvtransfer.fetches import Fetches
from paceline.services.kvtransfer.grpc_transport import GrpcTransport
from paceline.services.kvtransfer.ledger import Ledger
from paceline.services.kvtransfer.paths import Paths
from paceline.services.kvtransfer.prefixes import Prefixes
from paceline.services.kvtransfer.transport import ArenaMemory, Transport

MakeTransports = Callable[[ArenaMemory], Sequence[Transport]]
"""The ways to read blocks of other hosts into this memory that come before gRPC, best first."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """What is settled before the first worker comes."""

    host_id: str
    """Unique name of the host; workers with the same one share blocks."""
    kv_memory_bytes: int
    """Size of the arena."""
    arena_dir: Path
    """A tmpfs that all workers of the host see."""
    lease_seconds: float
    """A lease that is not renewed for this long ends."""
    secret: Secret
    """By which services of other hosts know this one."""
    enough_tokens: int = 0
    """Of these, or of one of the longest contexts, the arena need not hold more; 0 makes it as large as it may be."""
    disk: DiskOptions | None = None
    """A tier below the arena."""
    make_transports: MakeTransports = lambda memory: ()
    cache_policy: Callable[[int], CachePolicy] = LRU
    """Makes what chooses the blocks to evict, in the arena and on disk, for so many slots."""
    clock: Callable[[], float] = field(default_factory=AwakeClock)
    """Monotonic seconds of the ledger, by default those in which this process ran."""


class HostMemory:
    """Exists from the first worker on, whose layout it has, until `close`.

    Args:
        arena: its own from now on.
    """

    def __init__(self, options: HostOptions, layout: KVLayout, arena: Arena) -> None:
        self.layout = layout
        self.arena = arena
        self.pool_id = secrets.token_hex(8)
        """Names this memory among all that this host ever has."""
        slots = arena.size // layout.slot_bytes
        self.ledger = Ledger(layout, slots, options.lease_seconds, options.cache_policy(slots))
        # Stays mapped after `close`, for what still moves some of them.
        memory = map_arena(arena.path, arena.size)[: arena.size]
        blocks = ArenaMemory(memory, layout.slot_bytes, slots)
        self._channels = Channels(options.secret)
        self.grpc = GrpcTransport(blocks, self._channels)
        self._transports = transports = [*options.make_transports(blocks), self.grpc]
        offer = pb.Offer(host_id=options.host_id, transports={each.name: each.offer() for each in transports})
        self.disk = promotions = None
        if options.disk is not None:
            find, policy = self.ledger.slot_of, options.cache_policy
            self.disk = DiskTier(options.disk, len(layout.groups), blocks, find, policy)
            promotions = Promotions(layout, self.ledger, self.disk, options.clock)
        self.exports = Exports(layout, self.ledger, blocks, options.clock, offer)
        self.adoptions = Adoptions(self.ledger, options.clock)
        self.fetches = Fetches(
            layout, self.ledger, blocks, options.clock, self._channels, Paths(transports), self.adoptions.note
        )
        self.prefixes = Prefixes(layout, self.ledger, self.fetches, promotions)

    async def sweep(self) -> None:
        """Lets go of hosts that have not been heard of for long."""
        await self._channels.sweep()

    def close(self) -> Coroutine[None, None, None]:
        """Removes the arena now; its memory is free once no worker maps it. What is returned lets go of other hosts."""
        self.arena.close()
        return self._let_go()

    async def _let_go(self) -> None:
        if self.disk is not None:
            await self.disk.close()
        for transport in self._transports:
            await transport.close()
        await self._channels.close()
