"""What two UCX transports say to each other: plain numbers, checked before the library hears of them.

A worker address of UCX, which its users usually exchange, ends the process that opens it where a byte of it is wrong.
So an offer holds a port instead, and the host is the one whose gRPC server handed it out.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

TOKEN_BYTES = 16
MOST_SLOTS = 256
"""Of one request."""
MOST_SLOT = 2**32 - 1

_OFFER = struct.Struct(f"!4sHQ{TOKEN_BYTES}s")
_MAGIC = b"PUX1"
_REQUEST = struct.Struct(f"!{TOKEN_BYTES}sI{MOST_SLOTS}I")
REQUEST_BYTES = _REQUEST.size
"""All requests have one size, so that a reader cannot make the source take memory."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Where an arena can be read, and by what right."""

    port: int
    slot_bytes: int
    token: bytes
    """Who shows it may read."""

    def pack(self) -> bytes:
        return _OFFER.pack(_MAGIC, self.port, self.slot_bytes, self.token)

    @staticmethod
    def parse(data: bytes) -> Offer:
        """Raises ValueError where these bytes are no offer."""
        if len(data) != _OFFER.size:
            raise ValueError(f"an offer has {_OFFER.size} bytes, not {len(data)}")
        magic, port, slot_bytes, token = _OFFER.unpack(data)
        if magic != _MAGIC or not port or not slot_bytes:
            raise ValueError("these bytes are no offer of this version")
        return Offer(port, slot_bytes, token)


def pack_request(token: bytes, slots: Sequence[int]) -> bytes:
    """A request for up to MOST_SLOTS slots; the source sends each as a message whose tag is the place in this list."""
    return _REQUEST.pack(token, len(slots), *slots, *(0,) * (MOST_SLOTS - len(slots)))


def parse_request(data: bytes | bytearray, token: bytes, slots: int) -> list[int]:
    """The slots that a reader asks for.

    Args:
        token: what it must show.
        slots: how many the arena has.

    Raises:
        ValueError: it may not read, or asks for what is not there.
    """
    shown, count, *wanted = _REQUEST.unpack(data)
    if not hmac.compare_digest(shown, token):
        raise ValueError("the token is not the one of the offer")
    if count > MOST_SLOTS or any(slot >= slots for slot in wanted[:count]):
        raise ValueError(f"a request for {count} slots, some of which are not in an arena of {slots}")
    return wanted[:count]
