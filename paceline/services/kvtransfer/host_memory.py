"""The KV memory of a host: the arena, its ledger, and the services that move blocks in and out of it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.hints import Hint
from paceline.core.cache_policy.lru import LRU
from paceline.core.errors import BusyError
from paceline.core.kv_layout import KVLayout
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.credentials import Credentials
from paceline.services.common.shared_memory import map_arena
from paceline.services.common.tasks import to_the_end
from paceline.services.common.wire_version import OURS
from paceline.services.kvtransfer.arena import Arena
from paceline.services.kvtransfer.ledger.adoptions import Adoptions
from paceline.services.kvtransfer.ledger.hints import hinted_blocks
from paceline.services.kvtransfer.ledger.ledger import Ledger
from paceline.services.kvtransfer.transfers.disk_tier import DiskOptions, DiskTier
from paceline.services.kvtransfer.transfers.exports import Exports
from paceline.services.kvtransfer.transfers.fetches import Fetches
from paceline.services.kvtransfer.transfers.prefixes import Prefixes, Promotions
from paceline.services.kvtransfer.transports.grpc_transport import Channels, GrpcTransport
from paceline.services.kvtransfer.transports.transport import ArenaMemory, Paths, Transport

LONGEST_GAP_SECONDS = 1.0

log = logging.getLogger(__name__)


class AwakeClock:
    """A clock that counts only the seconds in which this process ran. It has to be called several times a second.

    A process that is stopped, or whose machine sleeps, cannot receive renewals of leases. Such a pause must not make
    leases expire. So at most LONGEST_GAP_SECONDS between two calls are counted.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._left_out = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._left_out += max(0.0, now - self._last - LONGEST_GAP_SECONDS)
        self._last = now
        return now - self._left_out


MakeTransports = Callable[[ArenaMemory], Sequence[Transport]]
"""A function from an arena's memory to the transports that are preferred to gRPC, best first."""

_HINTS_AT_ONCE = 512
"""Blocks whose hints are noted in one go, which takes about a millisecond."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The options that are known before the first worker attaches."""

    host_id: str
    """Unique name of the host. Workers of one host share blocks."""
    kv_memory_bytes: int
    """Largest size that the arena may have, in bytes."""
    arena_dir: Path
    """A tmpfs that all workers of the host can access."""
    lease_seconds: float
    """Seconds after which a lease ends if it is not renewed."""
    credentials: Credentials
    """Credentials that this service shows to services of other hosts, and demands of them."""
    enough_tokens: int = 0
    """Context tokens for which the arena gets blocks; more if the longest context of a worker has more tokens. If it is
    0, the arena takes all of `kv_memory_bytes`.
    """
    disk: DiskOptions | None = None
    """Options of the disk tier below the arena; None if there is none."""
    make_transports: MakeTransports = lambda memory: ()
    cache_policy: Callable[[int], CachePolicy] = LRU
    """Function that takes a number of slots and returns the policy that chooses the blocks to evict, for the arena and
    the disk tier."""
    clock: Callable[[], float] = field(default_factory=AwakeClock)
    """The ledger's clock in monotonic seconds. By default it counts the seconds in which this process ran."""


class HostMemory:
    """The KV memory, made for the layout of the first worker and in use until `close`.

    Args:
        layout: the workers' layout.
        arena: the arena, which `close` removes.
    """

    def __init__(self, options: HostOptions, layout: KVLayout, arena: Arena) -> None:
        self.layout = layout
        self.arena = arena
        self.pool_id = secrets.token_hex(8)
        """Random id of this memory. A later memory of the host has another one."""
        slots = arena.size // layout.slot_bytes
        self.ledger = Ledger(layout, slots, options.lease_seconds, options.cache_policy(slots))
        self.ledger.asleep = not arena.has_memory
        # Stays mapped after `close`, because transports may still be moving blocks.
        memory = map_arena(arena.path, arena.size)[: arena.size]
        blocks = ArenaMemory(memory, layout.slot_bytes, slots)
        self._clock = options.clock
        self._changing = asyncio.Lock()
        """Held while the arena's memory is given back or allocated, so that both happen in the order of the calls."""
        self.channels = Channels(options.credentials)
        """Channels to the services of other hosts."""
        self.grpc = GrpcTransport(blocks, self.channels)
        self._transports = transports = [*options.make_transports(blocks), self.grpc]
        means = {each.name: each.offer() for each in transports}
        offer = pb.Offer(host_id=options.host_id, transports=means, wire=OURS.to_pb())
        self.disk = promotions = None
        if options.disk is not None:
            find, policy = self.ledger.slot_of, options.cache_policy
            self.disk = DiskTier(options.disk, len(layout.all_groups), blocks, find, policy)
            promotions = Promotions(layout, self.ledger, self.disk, options.clock)
        self.exports = Exports(layout, self.ledger, blocks, options.clock, offer)
        self.adoptions = Adoptions(self.ledger, options.clock)
        self.fetches = Fetches(
            layout, self.ledger, blocks, options.clock, self.channels, Paths(transports), self.adoptions.note
        )
        self.prefixes = Prefixes(layout, self.ledger, self.fetches, promotions)

    @property
    def asleep(self) -> bool:
        """Whether the memory of the blocks is given back to the system, so that no block may be used."""
        return self.ledger.asleep

    async def expect(self, links: Sequence[bytes], hints: Sequence[Hint]) -> None:
        """Note hints about the first tokens of a context with these links, for blocks in the arena and on disk."""
        for index, ((group, digest), hint) in enumerate(hinted_blocks(self.layout, links, hints)):
            if index % _HINTS_AT_ONCE == 0:
                await asyncio.sleep(0)  # so that workers' batches, for which requests wait, are served in between
            self.ledger.expect(group, digest, hint, self._clock())
            if self.disk is not None:
                self.disk.expect(group, digest, hint)

    async def sleep(self) -> None:
        """Forget all cached blocks, and give the arena's memory back to the system, on a thread.

        Blocks that the disk tier has are found there after the sleep. Raises BusyError if blocks are in use.
        """
        async with self._changing:
            if not self.asleep:
                self._forget_all()
                self.ledger.asleep = True  # at first, because blocks may be reserved while the thread runs
                await to_the_end(asyncio.to_thread(self.arena.give_back))
                log.info("all workers sleep: %d bytes of KV memory are given back", self.arena.size)

    async def wake(self) -> None:
        """Allocate the arena's memory again, on a thread, because this takes about 0.2 s per GiB.

        Raises BusyError if the system has too little memory now, or if blocks are in use, whose content this would
        change.
        """
        async with self._changing:
            if self.asleep:
                self._forget_all()
                await to_the_end(asyncio.to_thread(self.arena.take_back))
                self.ledger.asleep = False

    def _forget_all(self) -> None:
        """Forget all cached blocks. Raises BusyError if blocks are in use."""
        self.ledger.forget()
        counts = self.ledger.counts()
        if used := counts.total - counts.free:
            raise BusyError(f"{used} KV blocks of this host are in use")

    async def sweep(self) -> None:
        """Close connections to other hosts that have been idle for a long time."""
        await self.channels.sweep()

    def close(self) -> Coroutine[None, None, None]:
        """Remove the arena now. Its memory is freed when no worker maps it any more.

        Returns a coroutine that ends the disk tier, the transports and the connections to other hosts.
        """
        self.arena.close()
        return self._let_go()

    async def _let_go(self) -> None:
        if self.disk is not None:
            await self.disk.close()
        for transport in self._transports:
            await transport.close()
        await self.channels.close()
