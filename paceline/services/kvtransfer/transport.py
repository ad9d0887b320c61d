"""Ways to pull blocks from another host's arena into one's own: one interface, so that the rest of the service does
not know which network there is."""

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
        """Raises ValueError where a slot is not in this arena."""
        if any(not 0 <= index < self.slots for index in indices):
            raise ValueError(f"this arena has {self.slots} slots; not all of these are in it: {indices}")


@dataclass(frozen=True, slots=True)
class Source:
    """Where to read: what the kvtransfer service of another host says of itself."""

    host_id: str
    address: str
    """Of its gRPC server."""
    offer: bytes
    """`Transport.offer` of the transport of the same name there. It came over the wire: whatever it holds, reading
    with it may fail, and nothing worse."""


class Transport(Protocol):
    """A way to pull blocks of other hosts, and the one to let others pull from here.

    Made on a running event loop, for one arena; all methods are called on that loop.
    """

    @property
    def name(self) -> str:
        """For logs, metrics, and to find the transport of the same kind on another host."""
        ...

    def offer(self) -> bytes:
        """What a reader on another host needs to know to read this arena. It also allows to: give it to those only who
        may read."""
        ...

    async def read(self, source: Source, slots: Sequence[tuple[int, int]]) -> None:
        """Copies blocks of `source` into this arena.

        Bytes are whatever the source's slots hold while they are read; the caller knows that they are filled, and
        verifies what came. While a read is under way its slots here hold anything. When it returns or raises, also
        where its task is cancelled, nothing touches them any more.

        Args:
            slots: pairs (slot there, slot here), each a whole slot. May be empty.

        Raises:
            UnavailableError: the source cannot be reached, refuses, or went silent for longer than a deadline.
            ValueError: a slot here is not in this arena.
        """
        ...

    async def close(self) -> None:
        """Ends what is under way, also what others read from here, and frees all there is. Memory of the arena may be
        unmapped after it. Closing twice is no error."""
        ...
