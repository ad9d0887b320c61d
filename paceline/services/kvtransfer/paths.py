"""Which way blocks come from which host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.avoid import Avoided
from paceline.services.kvtransfer.transport import Source, Transport

RETRY_SECONDS = (20.0, 40.0)
"""A path that failed is tried again after a time between these."""

log = logging.getLogger(__name__)


class Paths:
    """Reads blocks of other hosts by the best transport that works.

    Args:
        transports: best first. One that failed is left out for a while, but for the last.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = transports
        self._avoided: Avoided[tuple[str, str]] = Avoided(RETRY_SECONDS)
        """Hosts with the name of a transport that failed."""

    async def read(
        self, offer: pb.Offer, address: str, slots: Sequence[tuple[int, int]], damaged: Callable[[], int]
    ) -> str:
        """Pulls blocks (slot there, slot here); returns the name of the transport.

        Args:
            offer: how that arena can be read.
            address: of the service there.
            damaged: counts the blocks here that are not what they should be.

        Raises:
            UnavailableError: no path works.
        """
        avoided = self._avoided.now()
        offered = [transport for transport in self._transports if transport.name in offer.transports]
        usable = [each for each in offered if (offer.host_id, each.name) not in avoided]
        # The last one is what is left where all have failed lately, and where those that have not fail now.
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
                    self._avoid(offer.host_id, other, "other bytes came than by the next path")
                return transport.name
            # Where no path brings what was named, the blocks are others' by now, and the path is not to blame.
            failures.append(f"{count} of {len(slots)} blocks differ from their digests")
            damaging.append(transport)
        raise UnavailableError("; ".join(failures) or "it offers no path that is known here")

    def _avoid(self, host_id: str, transport: Transport, reason: str) -> None:
        self._avoided.add((host_id, transport.name))
        log.warning("blocks of host %s cannot be read over %s: %s", host_id, transport.name, reason)
