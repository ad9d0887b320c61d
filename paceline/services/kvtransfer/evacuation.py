"""Copies the hot prefixes of a host to other hosts before the host leaves.

The leaving service names the prefixes, and the other services read them as they read any prefix of another host. So
both ledgers need no operations of their own for this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio

from paceline.core.cache_policy.ranking import Name
from paceline.core.context import HASH_BYTES
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.tasks import end_tasks, heeding_cancellation
from paceline.services.kvtransfer.host_memory import HostMemory
from paceline.services.kvtransfer.hot_prefixes import hot_prefixes

MOST_BYTES = 1 << 30
"""Largest number of bytes that one evacuation copies."""
MOST_SECONDS = 10.0
"""Longest time that copying takes, in seconds."""
NAMES_SECONDS = 3.0
"""Deadline for a host to name its blocks, in seconds. A host that does not answer gets no copies."""
MOST_HOSTS = 16
"""Largest number of hosts that get copies. Each host is asked first which blocks it has."""
MOST_CHAINS = 4096
"""Largest number of prefixes in one message."""

FindHosts = Callable[[str], Awaitable[Sequence[str]]]
"""A function from a layout's fingerprint to the addresses of services on other hosts that stay and have this layout."""

log = logging.getLogger(__name__)


async def no_hosts(fingerprint: str) -> Sequence[str]:
    """Return no addresses: the `FindHosts` of a service that knows no other hosts."""
    return []


class Evacuation:
    """Copies hot prefixes of this host each time that it is about to leave. Simultaneous calls share one run.

    Args:
        address: address at which services of other hosts reach this one.
    """

    def __init__(self, find_hosts: FindHosts, address: str) -> None:
        self.has_readers = False
        """Whether the last run found other hosts that could read from this one."""
        self._find_hosts = find_hosts
        self._address = address
        self._running: asyncio.Task[int] | None = None

    async def run(self, memory: HostMemory) -> int:
        """Copy the prefixes and return the number of blocks that other hosts have read."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(memory), name="evacuation")
        return await asyncio.shield(self._running)

    async def close(self) -> None:
        """Cancel the running evacuation, if there is one."""
        if self._running is not None:
            await end_tasks(self._running)

    async def _run(self, memory: HostMemory) -> int:
        copied = [0]
        try:
            async with asyncio.timeout(MOST_SECONDS):
                hosts = (await self._find_hosts(memory.layout.fingerprint))[:MOST_HOSTS]
                self.has_readers = bool(hosts)
                if not hosts:
                    return 0
                answers = await asyncio.gather(*(self._names(memory, host) for host in hosts))
                known = {host: names for host, names in zip(hosts, answers, strict=True) if names is not None}
                elsewhere = set[Name]().union(*known.values())
                most = MOST_BYTES // memory.layout.slot_bytes
                chains = hot_prefixes(memory.ledger.blocks(), memory.layout, elsewhere, most)[:MOST_CHAINS]
                # The hottest prefixes go to different hosts, because each of them brings load.
                parts = [(host, chains[first :: len(known)]) for first, host in enumerate(known)]
                copied = await asyncio.gather(*(self._copy(memory, host, part) for host, part in parts if part))
        except TimeoutError:
            log.info("copying the hot prefixes was ended after %g s", MOST_SECONDS)
        log.info("other hosts have copied %d blocks of hot prefixes", sum(copied))
        return sum(copied)

    async def _names(self, memory: HostMemory, host: str) -> set[Name] | None:
        """Return the names of the blocks that another host has; None if it does not answer."""
        names = set[Name]()
        with memory.channels.to(host) as channel:
            call = pb_grpc.KVTransferStub(channel).Reusable(pb.ReusableRequest(), timeout=NAMES_SECONDS)
            try:
                while isinstance(reply := await heeding_cancellation(call.read()), pb.ReusableReply):
                    hashes, group = reply.names.hashes, reply.names.group
                    starts = range(0, len(hashes), HASH_BYTES)
                    names |= {(group, hashes[start : start + HASH_BYTES]) for start in starts}
            except grpc.aio.AioRpcError as error:
                log.warning("%s does not say which blocks it has: %s", host, error.details())
                return None
            finally:
                call.cancel()
        return names

    async def _copy(self, memory: HostMemory, host: str, chains: Sequence[Sequence[bytes]]) -> int:
        """Tell another host the prefixes to read. Return the number of blocks that it has read."""
        request = pb.CopyPrefixesRequest(
            fingerprint=memory.layout.fingerprint,
            source=self._address,
            prefixes=[pb.PrefixChain(hashes=hashes) for hashes in chains],
        )
        with memory.channels.to(host) as channel:
            call = pb_grpc.KVTransferStub(channel).CopyPrefixes(request)
            try:
                reply: pb.CopyPrefixesReply = await heeding_cancellation(call)
            except grpc.aio.AioRpcError as error:
                log.warning("%s has not copied the hot prefixes: %s", host, error.details())
                return 0
            finally:
                call.cancel()
        return reply.blocks
