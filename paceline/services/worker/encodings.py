"""A worker's access to the encodings that its host has cached."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.core.context import encoding_context, full_block_names
from paceline.core.errors import BusyError, PacelineError, StaleError, UnavailableError
from paceline.core.kv_layout import BASE_TOKENS, KVLayout
from paceline.core.types import Key
from paceline.engine.encoding_rows import EncodingRows
from paceline.services.worker.kv_client import KVClient
from paceline.services.worker.leases import Reservation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldEncoding:
    """An encoding whose blocks belong to this worker until it releases them."""

    key: Key
    """Key of the lease of the encoding's blocks."""
    digest: bytes
    length: int
    """Number of rows of the encoding."""
    slots: tuple[int, ...]
    """Slots of the arena that have the rows, in order."""
    cached_blocks: int
    """Number of blocks at the front that already contain their rows."""
    names: Sequence[bytes]
    """Name of each block, in the order of `slots`."""

    @property
    def is_complete(self) -> bool:
        """Whether the blocks contain all rows. If not, this worker has to write and publish them."""
        return self.cached_blocks == len(self.names)


class Encodings:
    """Gets encodings for a worker: cached ones to read, and blocks for new ones to write.

    An encoding that is written on one worker is found by all others as soon as it is published. If two workers write
    the same encoding at the same time, each writes blocks of its own, and only the blocks that were published first are
    cached afterwards.

    If a lease ends early, its blocks stay unchanged until the worker releases them, and blocks that the worker has
    written can still be published. So readers and writers need not know of the end.

    Args:
        layout: a layout with encodings.
        arena: all slots of the host, a flat tensor of the model's dtype.
    """

    def __init__(self, kv: KVClient, layout: KVLayout, arena: Tensor) -> None:
        self.rows = EncodingRows(layout, arena)
        self._kv = kv
        self._layout = layout
        (self._group,) = layout.part(encoding=True).groups
        # Each use of an encoding has a lease of its own, with a key that no other worker of the cluster has.
        self._nonce = secrets.token_hex(4)
        self._uses = itertools.count(1)

    async def reserve(self, digest: bytes, length: int, cache_salt: str = "", priority: int = 0) -> HeldEncoding:
        """Hold an encoding, so that this worker can compute it if it is not complete.

        Args:
            digest: name of the encoder's input; see `MediaInput.digest`.
            length: number of rows of the encoding.
            priority: the request's priority; lower is more urgent.

        Raises:
            BusyError: there are not enough free blocks.
        """
        key, links = self._key(digest), self._links(digest, length, cache_salt)
        await self._bring(key, links)
        tokens = len(links) * BASE_TOKENS
        reservation = await self._kv.reserve(key, links, tokens, tokens, priority, encoding=True)
        return self._held(reservation, digest, length, links)

    def size(self, held: HeldEncoding) -> int:
        """Return the size of an encoding's rows, in bytes."""
        return held.length * self.rows.hidden * self._layout.itemsize

    def write(self, held: HeldEncoding, rows: Tensor) -> None:
        """Write all rows of an encoding, [length, hidden] of the model's dtype. Publish it next."""
        self.rows.write(held.slots, held.cached_blocks, rows)

    async def publish(self, held: HeldEncoding) -> None:
        """Let all workers find an encoding that was written.

        Raises StaleError if kvtransfer does not know the lease, UnavailableError if it does not answer.
        """
        await self._kv.publish(held.key, held.names)

    async def hold(self, digest: bytes, length: int, cache_salt: str = "", source: str = "") -> HeldEncoding:
        """Hold a complete encoding, so that requests can read it. The other arguments are those of `reserve`.

        Args:
            source: address of another host's kvtransfer service that has cached the encoding; empty if none has.

        Raises:
            BusyError: there are not enough free blocks to bring the encoding to this host.
            UnavailableError: the encoding is neither cached on this host nor came from `source`.
        """
        key, links = self._key(digest), self._links(digest, length, cache_salt)
        await self._bring(key, links, source)
        held = self._held(await self._kv.pin(key, links, encoding=True), digest, length, links)
        if not held.is_complete:
            self.release(held)
            raise UnavailableError(f"encoding {digest.hex()} is not cached on this host; it has to be computed again")
        return held

    async def is_cached(self, digest: bytes, length: int, cache_salt: str = "") -> bool:
        """Return whether a complete encoding is cached on this host. If only the host's disk tier has it, it is first
        read into the arena.

        Raises BusyError if there are not enough free blocks to read it.
        """
        try:
            self.release(await self.hold(digest, length, cache_salt))
        except UnavailableError:
            return False
        return True

    def release(self, held: HeldEncoding) -> None:
        """Give the blocks back. Published blocks stay cached until they are evicted."""
        self._kv.release(held.key)

    def _key(self, digest: bytes) -> Key:
        return Key(f"encoding {digest.hex()} {self._nonce}", next(self._uses), 1)

    def _links(self, digest: bytes, length: int, cache_salt: str) -> Sequence[bytes]:
        return encoding_context(digest, length, cache_salt, self._layout).links(self._layout.fingerprint)

    async def _bring(self, key: Key, links: Sequence[bytes], source: str = "") -> None:
        """Bring an encoding from another host, or from the disk tier, into this host's cache, if it is not there.

        Raises BusyError if there are not enough free blocks for it. Other failures are logged.
        """
        if not (source or self._kv.session.has_disk):
            return
        try:
            await self._kv.fetch_prefix(key, source, links, encoding=True)
        except BusyError:
            raise
        except PacelineError as error:
            log.warning("an encoding did not come: %s", error)

    def _held(self, reservation: Reservation, digest: bytes, length: int, links: Sequence[bytes]) -> HeldEncoding:
        # Nothing may be awaited between these two: blocks in use are kept from others even if their lease ends.
        if not self._kv.has(reservation.key):
            self._kv.release(reservation.key)
            raise StaleError(f"the blocks of {reservation.key} are lost: their lease ended at once")
        self._kv.use(reservation.key)
        (slots,) = reservation.tables
        cached = reservation.filled_tokens // self._group.block_tokens
        names = full_block_names(self._group, links, len(links) * BASE_TOKENS)
        return HeldEncoding(reservation.key, digest, length, tuple(slots), cached, names)
