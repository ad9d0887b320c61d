"""The interface of transports, which read blocks of another host's arena into this host's. The rest of the service does
not depend on the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class ArenaMemory(NamedTuple):
    """The blocks of this host's arena, as transports see them."""

    blocks: memoryview
    """Writable bytes; slot i is [i * slot_bytes, (i + 1) * slot_bytes)."""
    slot_bytes: int
    slots: int

    def slot(self, index: int) -> memoryview:
        return self.blocks[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def check(self, indices: Sequence[int]) -> None:
        """Raise ValueError if a slot is not in this arena."""
        if any(not 0 <= index < self.slots for index in indices):
            raise ValueError(f"this arena has {self.slots} slots; not all of these are in it: {indices}")


@dataclass(frozen=True, slots=True)
class Source:
    """The arena of another host, as described by its kvtransfer service."""

    host_id: str
    address: str
    """Address of the gRPC server of that host's service."""
    offer: bytes
    """`Transport.offer` of the transport with the same name there. It is untrusted input: whatever it contains, the
    worst that a read may do is fail.
    """


class Transport(Protocol):
    """A way to read blocks of other hosts, and to let other hosts read blocks from here.

    It is constructed on a running event loop for one arena. All methods are called on this loop.
    """

    @property
    def name(self) -> str:
        """Name for logs and metrics. Transports with the same name can read from each other."""
        ...

    def offer(self) -> bytes:
        """Return the data that a reader on another host needs to read this arena.

        It contains a secret that permits reading. Give it only to services that may read.
        """
        ...

    async def read(self, source: Source, slots: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of `source` into this arena.

        It copies the bytes that the source's slots contain during the read. The caller knows that these slots are
        filled, and verifies the bytes. During the read, the slots here may contain anything. After the read has
        returned, raised or been cancelled, nothing touches them any more.

        Args:
            source: the arena to read from.
            slots: pairs (slot there, slot here) of whole slots. May be empty.

        Raises:
            UnavailableError: the source cannot be reached, refuses, or was silent for longer than a deadline.
            ValueError: a slot here is not in this arena.
        """
        ...

    async def close(self) -> None:
        """End all reads from other hosts, and reads of other hosts from here. Free all resources.

        After this the arena's memory may be unmapped. Closing twice is no error.
        """
        ...
