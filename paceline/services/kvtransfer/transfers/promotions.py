"""Copies blocks from the disk tier back into the arena before a request reserves them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from paceline.core.errors import PacelineError
from paceline.core.kv_layout import BASE_TOKENS, KVLayout
from paceline.core.prefix import match_prefix
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.lease import TRANSFER, Lease, prefix_key
from paceline.services.kvtransfer.ledger.ledger import Ledger
from paceline.services.kvtransfer.transfers.disk_tier import READERS, DiskTier

_TOGETHER = 4 * READERS
"""Number of blocks in one batch. A batch begins only after the last block of the previous one, so it is several times
READERS.
"""
PROMOTION_SECONDS = 2.0
"""Deadline for reading a whole prefix, in seconds. After it, the waiting request computes the prefix instead."""

log = logging.getLogger(__name__)


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
