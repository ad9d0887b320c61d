"""The interface of transports, which read blocks of another host's arena into this host's, and the choice among them.

The rest of the service does not depend on the network.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.avoid import Avoided


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


RETRY_SECONDS = (20.0, 40.0)
"""Shortest and longest time after which a transport that failed is tried again, in seconds."""

log = logging.getLogger(__name__)


class Paths:
    """Reads blocks of other hosts over the best transport that works.

    Args:
        transports: transports, best first. A transport that failed is avoided for a while, except for the last one.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = transports
        self._avoided: Avoided[tuple[str, str]] = Avoided(RETRY_SECONDS)
        """(host id, transport's name) of each transport that failed for a host."""

    async def read(
        self, offer: pb.Offer, address: str, slots: Sequence[tuple[int, int]], damaged: Callable[[], int]
    ) -> str:
        """Read blocks of another host. Return the name of the transport.

        Args:
            offer: the other service's description of how to read its arena.
            address: address of the other service.
            slots: pairs (slot there, slot here).
            damaged: returns how many of the blocks that were read differ from their digests.

        Raises:
            UnavailableError: no transport works.
        """
        avoided = self._avoided.now()
        offered = [transport for transport in self._transports if transport.name in offer.transports]
        usable = [each for each in offered if (offer.host_id, each.name) not in avoided]
        # Try the last one even if it failed recently: it is the fallback when the others fail or are avoided.
        order = usable + [each for each in offered[-1:] if each not in usable]
        failures: list[str] = []
        damaging: list[Transport] = []
        for transport in order:
            try:
                await transport.read(Source(offer.host_id, address, offer.transports[transport.name]), slots)
            except UnavailableError as error:
                failures.append(str(error))
                self._avoid(offer.host_id, transport, failures[-1])
                continue
            if not (count := damaged()):
                for other in damaging:
                    self._avoid(offer.host_id, other, "it brought other bytes than the next transport")
                return transport.name
            # Do not avoid this transport yet: if no transport brings the right bytes, the source has reused the slots.
            failures.append(f"{count} of {len(slots)} blocks differ from their digests")
            damaging.append(transport)
        raise UnavailableError("; ".join(failures) or "the source offers no transport that is known here")

    def _avoid(self, host_id: str, transport: Transport, reason: str) -> None:
        self._avoided.add((host_id, transport.name))
        log.warning("blocks of host %s cannot be read over %s: %s", host_id, transport.name, reason)
