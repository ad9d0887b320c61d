"""The stream in Redis that tells which blocks each host holds: what kvtransfer writes and gateways read.

It is a hint: it may be lost at any time, and nobody waits for it. Events of one pool are numbered without a gap, so
that a reader knows when it has missed some.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.block_pool import BlockEvent
from paceline.core.context import HASH_BYTES

_EVENT = struct.Struct(f"<BB{HASH_BYTES}s")
"""Whether it was stored, group, hash."""


def blocks_stream(cluster: str) -> str:
    """Key of the stream; its entries are those of `BlockBatch`."""
    return f"paceline:{cluster}:blocks"


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Events of one host that follow each other."""

    host_id: str
    pool: str
    """The memory that the blocks are in: another one begins empty, and with event 0."""
    first: int
    """Number of the first event."""
    events: tuple[BlockEvent, ...]

    def to_entry(self) -> dict[str, str | int | bytes]:
        packed = b"".join(_EVENT.pack(event.op == "stored", event.group, event.hash) for event in self.events)
        return {"host": self.host_id, "pool": self.pool, "first": self.first, "events": packed}

    @staticmethod
    def from_entry(entry: Mapping[bytes, bytes]) -> BlockBatch | None:
        """None for what a stranger wrote."""
        try:
            events = tuple(
                BlockEvent("stored" if stored else "removed", group, digest)
                for stored, group, digest in _EVENT.iter_unpack(entry[b"events"])
            )
            return BlockBatch(entry[b"host"].decode(), entry[b"pool"].decode(), int(entry[b"first"]), events)
        except (LookupError, ValueError, struct.error):
            return None
