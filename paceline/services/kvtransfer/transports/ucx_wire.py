"""The offer and the request of UCX transports. They are plain numbers, which are checked before the library uses them.

UCX's users usually exchange worker addresses. If one byte of such an address is wrong, the process that opens it ends.
So an offer has a port instead. The host is that of the gRPC server that sent the offer.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

TOKEN_BYTES = 16
MOST_SLOTS = 256
"""Largest number of slots that one request may ask for."""
MOST_SLOT = 2**32 - 1

_OFFER = struct.Struct(f"!4sHQ{TOKEN_BYTES}s")
_MAGIC = b"PUX1"
_REQUEST = struct.Struct(f"!{TOKEN_BYTES}sI{MOST_SLOTS}I")
REQUEST_BYTES = _REQUEST.size
"""Size of every request in bytes. It is fixed, so that a reader cannot make the source allocate memory."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The port at which an arena can be read, and the token that permits reading."""

    port: int
    slot_bytes: int
    token: bytes
    """Secret that a reader has to send with every request."""

    def pack(self) -> bytes:
        return _OFFER.pack(_MAGIC, self.port, self.slot_bytes, self.token)

    @staticmethod
    def parse(data: bytes) -> Offer:
        """Return the offer that `data` contains. Raises ValueError if `data` is no offer."""
        if len(data) != _OFFER.size:
            raise ValueError(f"an offer has {_OFFER.size} bytes, not {len(data)}")
        magic, port, slot_bytes, token = _OFFER.unpack(data)
        if magic != _MAGIC or not port or not slot_bytes:
            raise ValueError("these bytes are no offer of this version")
        return Offer(port, slot_bytes, token)


def pack_request(token: bytes, slots: Sequence[int]) -> bytes:
    """Return a request for up to MOST_SLOTS slots. The source sends each slot as a message tagged with the slot's index
    in `slots`.
    """
    return _REQUEST.pack(token, len(slots), *slots, *(0,) * (MOST_SLOTS - len(slots)))


def parse_request(data: bytes | bytearray, token: bytes, slots: int) -> list[int]:
    """Return the slots that a reader requests.

    Args:
        token: the token that the request must contain.
        slots: number of slots in the arena.

    Raises:
        ValueError: the token is wrong, or the arena does not have such slots.
    """
    shown, count, *wanted = _REQUEST.unpack(data)
    if not hmac.compare_digest(shown, token):
        raise ValueError("the token is not the one of the offer")
    if count > MOST_SLOTS or any(slot >= slots for slot in wanted[:count]):
        raise ValueError(f"a request for {count} slots, some of which are not in an arena of {slots}")
    return wanted[:count]
