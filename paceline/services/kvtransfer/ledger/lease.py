"""A lease: the right of one attempt of a request to use a set of blocks."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.errors import StaleError
from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.core.types import Key

NOBODY = 0
"""The session number that means no worker."""

TRANSFER = 2
"""The session number of this service itself, for moving blocks. Sessions of workers have odd numbers."""


def prefix_key(key: Key, origin: str = "") -> Key:
    """Return the key of a lease of this service for moving a request's prefix. `origin` tells such leases apart."""
    return key._replace(request_id=f"{origin}prefix of {key.request_id}")


class UnknownLeaseError(StaleError):
    """There is no such lease: it was never made, was released, or has expired."""


class State(enum.Enum):
    """The state of a lease. Its value is shown to operators."""

    RESERVED = "reserved"
    """Reserved. Its owner may write, or wait until a prefill worker opens it."""
    FILLING = "filling"
    """Opened by a prefill worker, which may write."""
    FILLED = "filled"
    """Complete and waiting to be adopted. Nobody writes."""
    ACTIVE = "active"
    """Adopted by its owner, which may write."""
    DRAINING = "draining"
    """Ended, but a worker may still touch the blocks."""


_IN_FLIGHT = frozenset((State.FILLING, State.FILLED, State.DRAINING))


@dataclass(slots=True, kw_only=True)
class Lease:
    """A lease, which only the ledger changes. All times are in seconds of the ledger's clock."""

    key: Key
    """The key with the newest generation."""
    layout: KVLayout
    """The part of the arena's layout to which the blocks belong: KV, or encodings."""
    first_generation: int
    state: State
    owner: int
    """Session that reserved or adopted the lease."""
    writer: int
    """The only session that may touch the blocks now, or NOBODY."""
    token_count: int
    filled_tokens: int
    """Number of the context's first tokens whose content is already in the blocks."""
    tables: list[list[int]]
    """One block table for each group of `layout`, with NO_SLOT for each block that was given back or never needed."""
    created: float
    deadline: float
    priority: int = 0
    """Priority of the request; lower is more urgent."""
    context_hash: bytes = b""
    """Hash of the tokens whose KV is in the blocks: the hash of the cached prefix, or the hash given to `fill`."""

    @property
    def in_flight(self) -> bool:
        return self.state in _IN_FLIGHT

    @property
    def encoding(self) -> bool:
        """Whether the blocks have an encoding rather than KV."""
        return self.layout.first_group > 0

    def slots(self) -> list[int]:
        return held_slots(self.tables)


def held_slots(tables: Iterable[Sequence[int]]) -> list[int]:
    return [slot for table in tables for slot in table if slot != NO_SLOT]
