"""The last actions of a host before its memory is freed: when its last worker leaves, and when the service ends.

The cached prefixes that are worth most to other hosts are copied to them: the leaving service names the prefixes, and
the other services read them as they read any prefix of another host. So both ledgers need no operations of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

import grpc.aio

from paceline.core.cache_policy.ranking import Block, Name
from paceline.core.context import HASH_BYTES
from paceline.core.kv_layout import BASE_TOKENS, KVLayout
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.tasks import InUse, end_tasks, heeding_cancellation
from paceline.services.kvtransfer.host_memory import HostMemory
from paceline.services.kvtransfer.sessions import Sessions

_NO_BLOCK_ENDS_HERE = bytes(HASH_BYTES)


def hot_prefixes(
    blocks: Iterable[Block], layout: KVLayout, elsewhere: Collection[Name], most_blocks: int
) -> list[list[bytes]]:
    """Return hash chains of prefixes, the hottest first. A prefix is left out if another chain begins with it.

    A block is hotter than another one if more requests have found it, or equally many requests but more recently. A
    model without full attention has no chains, because a block with a window does not name the block before it.

    Args:
        blocks: the reusable blocks of the host.
        elsewhere: names of the blocks that another host has.
        most_blocks: approximate limit on the blocks in the chains that no other host has.

    Returns:
        One hash for each BASE_TOKENS tokens of each prefix. If blocks have more tokens, the links at which no block
        ends are zeros.
    """
    full = [(group.block_tokens, index) for index, group in enumerate(layout.groups) if group.shape.window == 0]
    if not full:
        return []
    tokens, group = min(full)
    known_blocks = {block.name: block for block in blocks if block.name[0] == group}
    chosen: dict[Name, None] = {}
    for block in sorted(known_blocks.values(), key=lambda block: (block.touches, block.used), reverse=True):
        if len(chosen) >= most_blocks:
            break
        if block.name not in elsewhere and (path := _path(known_blocks, block, chosen)) is not None:
            chosen |= dict.fromkeys(path)
    inner = {known_blocks[name].parent for name in chosen}
    filler = [_NO_BLOCK_ENDS_HERE] * (tokens // BASE_TOKENS - 1)
    return [
        [
            link
            for _, digest in reversed(_path(known_blocks, known_blocks[name], {}) or [])
            for link in (*filler, digest)
        ]
        for name in chosen
        if name not in inner
    ]


def _path(known_blocks: Mapping[Name, Block], block: Block, known: Collection[Name]) -> list[Name] | None:
    """Return the names of the block and of the blocks before it, back to the first block or to a known one.

    Returns None if one of them is missing. Then no request can use the block.
    """
    path = [block.name]
    while (parent := block.parent) is not None and parent not in known:
        if (before := known_blocks.get(parent)) is None:
            return None
        path.append(parent)
        block = before
    return path


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


READERS_SECONDS = 1.0
"""Time for gateways to begin the next attempts of requests whose worker has left, in seconds."""


class Departure:
    """The departure of a host's workers and of its service.

    Args:
        find_hosts: finds the hosts that get the hot prefixes of this host.
        address: address at which services of other hosts reach this one.
    """

    def __init__(self, sessions: Sessions, find_hosts: FindHosts, address: str) -> None:
        self.readers = InUse()
        """Calls in which other hosts read blocks of this one."""
        self._sessions = sessions
        self._evacuation = Evacuation(find_hosts, address)

    async def leave(self, session: int) -> int:
        """Note that a worker leaves soon. If no other worker stays, copy the hot prefixes to other hosts.

        Returns the number of copied blocks. Raises PacelineError if the session has ended.
        """
        memory = self._sessions.check(session)
        return await self._evacuation.run(memory) if self._sessions.is_last_to_leave(session) else 0

    async def close(self) -> None:
        """Stop copying blocks to other hosts, because the service ends."""
        await self._evacuation.close()

    async def drain(self, seconds: float) -> None:
        """Tell the workers to drain, and wait up to `seconds` until they and the readers of other hosts have gone.

        The next attempts of the workers' requests read their blocks from here, so the service stays a moment longer
        than the workers.
        """
        had_workers = bool(self._sessions.workers)
        self._sessions.leaving.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._sessions.wait_until_left()
                if had_workers and self._sessions.memory is not None:
                    await self._evacuation.run(self._sessions.memory)
                if had_workers and self._evacuation.has_readers:
                    await asyncio.sleep(READERS_SECONDS)
                await self.readers.wait_until_idle()
