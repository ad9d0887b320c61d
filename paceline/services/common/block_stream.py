"""The Redis stream of block events: kvtransfer services write the changes of their reusable blocks, and gateways read
them.

The stream is only a hint: it may be lost at any time, and no service depends on it. Events of one pool are numbered
without gaps, so a reader notices when it has missed events.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.block_pool import BlockEvent
from paceline.core.context import HASH_BYTES

_EVENT = struct.Struct(f"<BB{HASH_BYTES}s")
"""Binary format of an event: 1 if the block was stored or 0 if it was removed, the block's group, the block's hash."""


def blocks_stream(cluster: str) -> str:
    """Return the Redis key of a cluster's stream. Its entries are made by `BlockBatch.to_entry`."""
    return f"paceline:{cluster}:blocks"


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Consecutive block events of one host."""

    host_id: str
    pool: str
    """Id of the pool of memory that contains the blocks. A new pool is empty, and its events are numbered from 0."""
    first: int
    """Number of the batch's first event in its pool."""
    events: tuple[BlockEvent, ...]

    def to_entry(self) -> dict[str, str | int | bytes]:
        packed = b"".join(_EVENT.pack(event.op == "stored", event.group, event.hash) for event in self.events)
        return {"host": self.host_id, "pool": self.pool, "first": self.first, "events": packed}

    @staticmethod
    def from_entry(entry: Mapping[bytes, bytes]) -> BlockBatch | None:
        """Decode an entry of the stream; None if it has another format, as an entry of another program may have."""
        try:
            events = tuple(
                BlockEvent("stored" if stored else "removed", group, digest)
                for stored, group, digest in _EVENT.iter_unpack(entry[b"events"])
            )
            return BlockBatch(entry[b"host"].decode(), entry[b"pool"].decode(), int(entry[b"first"]), events)
        except (LookupError, ValueError, struct.error):
            return None
