"""Which way blocks come from which host."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.transport import Source, Transport

RETRY_SECONDS = (20.0, 40.0)
"""A path that failed is tried again after a time between these."""

log = logging.getLogger(__name__)


class Paths:
    """Reads blocks of other hosts by the best transport that works.

    Args:
        transports: best first. The last one is tried even if it has failed lately.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = transports
        self._shut: dict[tuple[str, str], float] = {}
        """By host and name of transport: when it may be tried again, on time.monotonic()."""

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
        now = time.monotonic()
        self._shut = {place: until for place, until in self._shut.items() if until > now}
        offered = [transport for transport in self._transports if transport.name in offer.transports]
        usable = [each for each in offered if (offer.host_id, each.name) not in self._shut]
        failures = []
        for transport in usable or offered[-1:]:
            try:
                await transport.read(Source(offer.host_id, address, offer.transports[transport.name]), slots)
                if not (count := damaged()):
                    return transport.name
                failures.append(f"{count} of {len(slots)} blocks differ from their digests")
            except UnavailableError as error:
                failures.append(str(error))
            self._shut[offer.host_id, transport.name] = time.monotonic() + random.uniform(*RETRY_SECONDS)
            log.warning("blocks of host %s cannot be read over %s: %s", offer.host_id, transport.name, failures[-1])
        raise UnavailableError("; ".join(failures) or "it offers no path that is known here")
