"""Brings prefixes into the host's cache, from its disk or another host. Requests that need one prefix at the same time
share the transfer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Sequence

from paceline.core.errors import BusyError, TransferError
from paceline.core.kv_layout import KVLayout
from paceline.core.prefix import lacking_links
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.ledger.ledger import Ledger
from paceline.services.kvtransfer.transfers.fetches import Fetches
from paceline.services.kvtransfer.transfers.flights import Flights
from paceline.services.kvtransfer.transfers.promotions import Promotions

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
