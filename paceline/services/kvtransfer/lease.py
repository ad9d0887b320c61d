"""A lease: the right of one attempt at one request to a set of blocks."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.errors import StaleError
from paceline.core.kv_layout import NO_SLOT
from paceline.core.types import Key

NOBODY = 0
"""Stands for a session where no worker is meant."""

TRANSFER = 2
"""The session of this service itself, in which it moves blocks between hosts. Those of workers are odd."""


def prefix_key(key: Key, origin: str = "") -> Key:
    """Of the service's own lease in which a prefix for this request is moved, at either end."""
    return key._replace(request_id=f"{origin}prefix of {key.request_id}")


class UnknownLeaseError(StaleError):
    """No such lease: never made, released, or expired."""


class State(enum.Enum):
    """Where a lease is in its life. The value is what an operator reads."""

    RESERVED = "reserved"
    """Its owner may write, or wait for a prefill worker to open it."""
    FILLING = "filling"
    """A prefill worker writes."""
    FILLED = "filled"
    """Complete; waits to be adopted. Nobody writes."""
    ACTIVE = "active"
    """Adopted; its owner writes."""
    DRAINING = "draining"
    """Over for everybody, but a worker may still touch the blocks."""


_IN_FLIGHT = frozenset((State.FILLING, State.FILLED, State.DRAINING))


@dataclass(slots=True, kw_only=True)
class Lease:
    """Changed by the ledger alone. All instants are seconds of the ledger's clock."""

    key: Key
    """With the newest generation."""
    first_generation: int
    state: State
    owner: int
    """Session that reserved or adopted it."""
    writer: int
    """The only session that may touch the blocks now, or NOBODY."""
    token_count: int
    filled_tokens: int
    """Tokens at the front whose KV is already in the blocks."""
    tables: list[list[int]]
    """One block table a group; NO_SLOT where a block was given back or never needed."""
    created: float
    deadline: float
    priority: int = 0
    """Of the request; a lower one is more urgent."""
    context_hash: bytes = b""
    """Names the tokens whose KV is in it: as the cache did, or as the writer does that has filled it."""

    @property
    def in_flight(self) -> bool:
        return self.state in _IN_FLIGHT

    def slots(self) -> list[int]:
        return held_slots(self.tables)


def held_slots(tables: Iterable[Sequence[int]]) -> list[int]:
    return [slot for table in tables for slot in table if slot != NO_SLOT]
