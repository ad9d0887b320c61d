"""Claims: the leases that workers report to a new service after the old one ended, and checks of their consistency."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.cache_policy.ranking import Place
from paceline.core.context import HASH_BYTES
from paceline.core.errors import InvalidRequestError
from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.block_tables import place_of
from paceline.services.kvtransfer.ledger.lease import Lease, State


class ContradictionError(InvalidRequestError):
    """Claims that contradict each other or the layout, so that nobody can tell which lease owns which block."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A lease as reported by its writer, which is the only worker that may touch its blocks."""

    session: int
    key: Key
    token_count: int
    filled_tokens: int
    tables: list[list[int]]
    """One block table for each group of the lease."""
    names: list[list[bytes]]
    """The hash of each block in `tables`; empty if the block is not sealed."""
    active: bool
    """False if the lease has ended but the worker has not stopped touching its blocks yet."""
    encoding: bool = False
    """Whether the blocks have an encoding rather than KV."""


Slots = dict[int, tuple[int, tuple[int, bytes] | None]]
"""For each slot, the number of claims that name it, and (group number, hash) if its block is sealed."""


def claimed_slots(layout: KVLayout, slots: int, claims: Iterable[Claim]) -> Slots:
    """Return all slots that the claims name.

    Args:
        layout: the layout that all workers have.
        slots: number of slots in the arena.
        claims: the claims of all workers.

    Raises:
        ContradictionError: two claims share a block that is not sealed or that they name differently, or a claim does
            not fit the layout or the arena.
    """
    found: Slots = {}
    keys: set[Key] = set()
    living: set[tuple[str, int]] = set()
    for claim in claims:
        if claim.key in keys or (claim.active and claim.key[:2] in living):
            raise ContradictionError(f"{claim.key} is claimed twice")
        keys.add(claim.key)
        if claim.active:
            living.add(claim.key[:2])
        part = layout.part(claim.encoding)
        _check_shape(part, claim)
        for group, (table, names) in enumerate(zip(claim.tables, claim.names), part.first_group):
            for slot, digest in zip(table, names):
                if slot != NO_SLOT:
                    _add(found, slots, slot, (group, digest) if digest else None, claim.key)
    _check_sharing(found)
    return found


def claimed_places(layout: KVLayout, claims: Sequence[Claim]) -> dict[int, Place]:
    """Return the places of the sealed blocks, by slot."""
    return {
        slot: place_of(layout.part(claim.encoding), group, block, names[block], names[block - 1] if block else b"")
        for claim in claims
        for group, (table, names) in enumerate(zip(claim.tables, claim.names))
        for block, slot in enumerate(table)
        if names[block]
    }


def restored_lease(layout: KVLayout, claim: Claim, now: float, lease_seconds: float) -> Lease:
    """Return a new `Lease` with the contents of a claim, valid for `lease_seconds` from `now` if the claim is
    active.
    """
    return Lease(
        key=claim.key,
        layout=layout.part(claim.encoding),
        first_generation=claim.key.generation,
        state=State.ACTIVE if claim.active else State.DRAINING,
        owner=claim.session,
        writer=claim.session,
        token_count=claim.token_count,
        filled_tokens=claim.filled_tokens,
        tables=[list(table) for table in claim.tables],
        created=now,
        deadline=now + lease_seconds if claim.active else math.inf,
    )


def _add(found: Slots, slots: int, slot: int, name: tuple[int, bytes] | None, key: Key) -> None:
    count, known = found.get(slot, (0, name))
    if not 0 <= slot < slots or (count and (name is None or known != name)):
        raise ContradictionError(f"{key} claims block {slot}, which does not exist or conflicts with another claim")
    found[slot] = (count + 1, name)


def _check_shape(layout: KVLayout, claim: Claim) -> None:
    wanted = [group.blocks_for(claim.token_count) for group in layout.groups]
    if [len(table) for table in claim.tables] != wanted or [len(names) for names in claim.names] != wanted:
        raise ContradictionError(f"the tables of {claim.key} do not cover its {claim.token_count} tokens")
    if any(len(digest) not in (0, HASH_BYTES) for names in claim.names for digest in names):
        raise ContradictionError(f"{claim.key} has a hash of the wrong length")


def _check_sharing(found: Slots) -> None:
    """Raise ContradictionError if two blocks with the same name are shared: the index has only one of them."""
    shared: dict[tuple[int, bytes], int] = defaultdict(int)
    for count, name in found.values():
        if count > 1 and name is not None:
            shared[name] += 1
    if any(count > 1 for count in shared.values()):
        raise ContradictionError("two blocks with the same content are both shared")
