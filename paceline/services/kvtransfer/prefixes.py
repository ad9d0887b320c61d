"""A prefix that a request lacks comes into the host's cache, from its disk or from another host: once, however many ask
for it at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from paceline.core.errors import TransferError
from paceline.core.kv_layout import KVLayout
from paceline.core.prefix import lacking_links
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.disk_tier import Promotions
from paceline.services.kvtransfer.fetches import Fetches
from paceline.services.kvtransfer.flights import Flights
from paceline.services.kvtransfer.ledger import Ledger

PREFIX_SECONDS = 5.0
"""For all of a prefix, waiting for others included; its request waits, and could have been computed instead."""


class Prefixes:
    """Brings prefixes in.

    Args:
        promotions: from the disk, where there is one.
    """

    def __init__(self, layout: KVLayout, ledger: Ledger, fetches: Fetches, promotions: Promotions | None) -> None:
        self._layout = layout
        self._ledger = ledger
        self._fetches = fetches
        self._promotions = promotions
        self._flights: Flights[asyncio.Event] = Flights()
        """Of calls, each by the event that wakes it."""

    async def bring(self, key: Key, source: str, hashes: Sequence[bytes]) -> pb.FetchReply:
        """Has cached here, if it can, what the disk or another host has of a context. Tells what came from the latter.

        Args:
            key: of the request for which it is brought.
            source: address of the service that has it; empty where only the disk is to be asked.
            hashes: chain of the context, no more of it than can be reused.

        Raises:
            BusyError: there are no blocks to bring it into.
            TransferError: it could not be brought.
        """
        is_asked = False
        try:
            async with asyncio.timeout(PREFIX_SECONDS), self._flight(hashes) as is_needed:
                if is_needed and self._promotions is not None:
                    await self._promotions.run(key, hashes)
                if is_needed and source:
                    is_asked = True
                    return await self._fetches.run_prefix(key, source, hashes)
        except TimeoutError:
            if not is_asked:  # others took all the time; the source is not to blame
                return pb.FetchReply()
            self._fetches.totals.failures += 1
            raise TransferError(f"the prefix of {key} did not come within {PREFIX_SECONDS:g} s") from None
        return pb.FetchReply()

    @contextlib.asynccontextmanager
    async def _flight(self, hashes: Sequence[bytes]) -> AsyncIterator[bool]:
        """Waits for others that bring what this context lacks first. Yields whether it lacks anything then."""
        woken = asyncio.Event()
        try:
            while not self._flights.ask(woken, lacking := lacking_links(self._layout, self._ledger.slot_of, hashes)):
                woken.clear()
                await woken.wait()
            yield bool(lacking)
        finally:
            for other in self._flights.end(woken):
                other.set()
