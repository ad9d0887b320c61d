"""Brings prefixes into the host's cache, from its disk or another host. Requests that need one prefix at the same time
share the transfer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from paceline.core.errors import BusyError, PacelineError, TransferError
from paceline.core.kv_layout import BASE_TOKENS, KVLayout
from paceline.core.prefix import lacking_links, match_prefix
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.ledger.lease import TRANSFER, Lease, prefix_key
from paceline.services.kvtransfer.ledger.ledger import Ledger
from paceline.services.kvtransfer.transfers.disk_tier import READERS, DiskTier
from paceline.services.kvtransfer.transfers.fetches import Fetches

_TOGETHER = 4 * READERS
"""Number of blocks in one batch. A batch begins only after the last block of the previous one, so it is several times
READERS.
"""
PROMOTION_SECONDS = 2.0
"""Deadline for reading a whole prefix, in seconds. After it, the waiting request computes the prefix instead."""


class Promotions:
    """Copies blocks from the disk tier back into the arena before a request reserves them.

    Args:
        clock: the ledger's clock, in seconds.
    """

    def __init__(self, layout: KVLayout, ledger: Ledger, disk: DiskTier, clock: Callable[[], float]) -> None:
        self._layout = layout
        self._ledger = ledger
        self._disk = disk
        self._clock = clock

    async def run(self, key: Key, hashes: Sequence[bytes], encoding: bool = False) -> None:
        """Copy the blocks of a context that the disk has and the arena lacks into the arena, and cache them there.

        The blocks come into a lease of this service, which ends with this call. Blocks that are not read within
        PROMOTION_SECONDS stay cache misses.

        Args:
            key: key of the request that waits for the blocks.
            hashes: chain of the part of the context that may be reused, one hash for each BASE_TOKENS tokens.
            encoding: whether the context is an encoding.

        Raises:
            BusyError: the arena has too few available blocks.
        """
        tokens, layout = len(hashes) * BASE_TOKENS, self._layout.part(encoding)
        length, _ = match_prefix(layout, self._find, hashes, tokens)
        if length <= match_prefix(layout, self._ledger.slot_of, hashes, tokens)[0]:
            return
        hashes, disk_key, now = hashes[: length // BASE_TOKENS], prefix_key(key, "disk "), self._clock()
        lease = self._ledger.reserve(TRANSFER, disk_key, hashes, length, length, now, encoding=encoding)
        try:
            async with asyncio.timeout(PROMOTION_SECONDS):
                await self._bring(lease, hashes, length)
        except TimeoutError:
            log.warning("the disk tier took longer than %g s; computing instead", PROMOTION_SECONDS)
        finally:
            with contextlib.suppress(PacelineError):
                self._ledger.release(TRANSFER, lease.key, self._clock())

    def _find(self, group: int, digest: bytes) -> int | None:
        slot = self._ledger.slot_of(group, digest)
        return self._disk.find(group, digest) if slot is None else slot

    async def _bring(self, lease: Lease, hashes: Sequence[bytes], length: int) -> None:
        places, groups, first_group = list[tuple[int, int]](), lease.layout.groups, lease.layout.first_group
        for number, group in enumerate(groups):
            first = max(lease.filled_tokens // group.block_tokens, group.first_needed_block(length))
            places += [(number, index) for index in range(first, group.blocks_for(length))]
        strides = [group.block_tokens // BASE_TOKENS for group in groups]
        names = [hashes[(index + 1) * strides[number] - 1] for number, index in places]
        wanted = [(number, index, name) for (number, index), name in zip(places, names)]
        # In batches, in the order of the context: if the deadline passes, the blocks before it still form a prefix.
        wanted.sort(key=lambda block: (block[1] + 1) * groups[block[0]].block_tokens)
        for first in range(0, len(wanted), _TOGETHER):
            part = wanted[first : first + _TOGETHER]
            came = await self._disk.read(
                [(first_group + number, name, lease.tables[number][index]) for number, index, name in part]
            )
            for (number, index, name), is_here in zip(part, came):
                if is_here:
                    self._ledger.seal(TRANSFER, lease.key, number, index, [name], self._clock())
            if not all(came):
                return


Caller = TypeVar("Caller", bound=Hashable)


class Flights(Generic[Caller]):
    """Callers that lack blocks of their contexts on this host. A caller fetches its blocks, or waits for another caller
    that fetches the first of these blocks."""

    def __init__(self) -> None:
        self._flying: dict[Caller, frozenset[bytes]] = {}
        """For each caller that brings links, the links that it lacked when it began."""
        self._waiting: dict[Caller, Caller] = {}
        """For each waiting caller, the caller for which it waits."""

    def ask(self, caller: Caller, lacking: Sequence[bytes]) -> bool:
        """Return whether the caller may bring its links now, until it calls `end`.

        If not, another caller is bringing the first of these links. Then the caller waits until the `end` of another
        caller returns it, and asks again with the links that it still lacks.

        Args:
            lacking: the links that are not cached here, in the order of the chain. If it is empty, the answer is True.
        """
        ahead = next((other for other, links in self._flying.items() if lacking and lacking[0] in links), None)
        if ahead is None:
            self._flying[caller] = frozenset(lacking)
            return True
        self._waiting[caller] = ahead
        return False

    def end(self, caller: Caller) -> list[Caller]:
        """Remove a caller whose fetch has ended, however it ended, or that no longer waits for another caller's fetch.

        Returns:
            The callers that waited for the removed caller. They have to ask again.
        """
        self._flying.pop(caller, None)
        self._waiting.pop(caller, None)
        woken = [other for other, ahead in self._waiting.items() if ahead == caller]
        for other in woken:
            del self._waiting[other]
        return woken


PREFIX_SECONDS = 5.0
"""Deadline for a whole prefix, in seconds, including the wait for other requests. After it, the request computes the
prefix instead.
"""
_COPIED_SHARE = 8
"""At most one of this many blocks of the arena may be copied from a host that leaves."""

log = logging.getLogger(__name__)


class Prefixes:
    """Brings prefixes into the host's cache.

    Args:
        promotions: reads blocks from the disk tier; None if there is none.
    """

    def __init__(self, layout: KVLayout, ledger: Ledger, fetches: Fetches, promotions: Promotions | None) -> None:
        self._layout = layout
        self._ledger = ledger
        self._fetches = fetches
        self._promotions = promotions
        self._flights: Flights[asyncio.Event] = Flights()
        """The calls of `bring`, each identified by the event that wakes it."""

    async def bring(self, key: Key, source: str, hashes: Sequence[bytes], encoding: bool = False) -> pb.FetchReply:
        """Cache the blocks of a context that the disk or another host has. Return the totals of the transfer from the
        other host.

        Args:
            key: key of the request that waits for the prefix.
            source: address of the service that has the prefix; empty if only the disk shall be read.
            hashes: chain of the part of the context that may be reused, one hash for each BASE_TOKENS tokens.
            encoding: whether the context is an encoding.

        Raises:
            BusyError: too few blocks are available here.
            TransferError: the blocks could not be read from the other host.
        """
        is_asked, layout = False, self._layout.part(encoding)
        try:
            async with asyncio.timeout(PREFIX_SECONDS), self._flight(layout, hashes) as is_needed:
                if is_needed and self._promotions is not None:
                    await self._promotions.run(key, hashes, encoding)
                if is_needed and source:
                    is_asked = True
                    return await self._fetches.run_prefix(key, source, hashes, encoding)
        except TimeoutError:
            if not is_asked:  # the deadline passed before the source was asked, so the source has not failed
                return pb.FetchReply()
            self._fetches.totals.failures += 1
            raise TransferError(f"the prefix of {key} did not come within {PREFIX_SECONDS:g} s") from None
        return pb.FetchReply()

    async def copy(self, source: str, chains: Sequence[Sequence[bytes]]) -> int:
        """Cache prefixes of a host that leaves, the most valuable first. Return the number of blocks that came.

        It stops early if a prefix does not come, or if more blocks would take too much of this host's own cache.
        """
        most, copied = self._ledger.counts().total // _COPIED_SHARE, 0
        for hashes in chains:
            key = Key(f"copy {secrets.token_hex(8)}", 1, 1)
            try:
                copied += (await self.bring(key, source, hashes)).blocks
            except (BusyError, TransferError) as error:
                log.info("the copy of prefixes from %s ended early: %s", source, error)
                break
            if copied >= most:
                break
        return copied

    @contextlib.asynccontextmanager
    async def _flight(self, layout: KVLayout, hashes: Sequence[bytes]) -> AsyncIterator[bool]:
        """Wait while another call brings the first block that is missing here. Yield whether blocks are still missing
        after that.
        """
        woken = asyncio.Event()
        try:
            while not self._flights.ask(woken, lacking := lacking_links(layout, self._ledger.slot_of, hashes)):
                woken.clear()
                await woken.wait()
            yield bool(lacking)
        finally:
            for other in self._flights.end(woken):
                other.set()
