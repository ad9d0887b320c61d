"""The choice of a transport for reading blocks of another host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.avoid import Avoided
from paceline.services.kvtransfer.transports.transport import Source, Transport

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
