"""The ledger as operators see it: its leases and their owners, and counts of lookups in the cache. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.cache_policy.ranking import Name
from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.wire import key_to_pb
from paceline.services.kvtransfer.ledger.lease import NOBODY, Lease


@dataclass(slots=True)
class Lookups:
    """Totals of all lookups so far."""

    queried_tokens: int = 0
    """Number of tokens in the full blocks that were looked up: the most that could be found. For encodings, rows."""
    cached_tokens: int = 0
    """Number of tokens that were found in the cache. For encodings, rows."""

    def add(self, queried_tokens: int, cached_tokens: int) -> None:
        self.queried_tokens += queried_tokens
        self.cached_tokens += cached_tokens


def count_groups(leases: Iterable[Lease], cached: Iterable[Name], layout: KVLayout) -> pb.LedgerReply:
    """Return the part of a ledger reply that counts the used and the cached blocks of each group.

    Args:
        leases: all leases.
        cached: names of the cached blocks.
        layout: layout of the arena.
    """
    reply = pb.LedgerReply()
    groups = [group.shape.name for group in layout.all_groups]
    used: list[set[int]] = [set() for _ in groups]
    for lease in leases:
        for number, table in enumerate(lease.tables, lease.layout.first_group):
            used[number].update(table)
    # Counts are added up, because a group of a draft model may have the same name as a group of the target.
    for name, slots in zip(groups, used):
        reply.used_by_group[name] += len(slots - {NO_SLOT})
        reply.cached_by_group[name] += 0
    for number, _ in cached:
        reply.cached_by_group[groups[number]] += 1
    return reply


def count_owners(leases: Iterable[Lease], workers: Mapping[int, str]) -> pb.LedgerReply:
    """Return the part of a ledger reply that counts the blocks of each owner by the state of their leases.

    Args:
        leases: all leases.
        workers: ids of workers by session.
    """
    blocks = Counter[tuple[str, str]]()
    seen: set[int] = set()
    for lease in sorted(leases, key=lambda lease: lease.created):
        new_slots = set(lease.slots()) - seen
        seen |= new_slots
        blocks[workers.get(lease.owner, "gone"), lease.state.value] += len(new_slots)
    owned = (pb.OwnedBlocks(owner=owner, state=state, blocks=count) for (owner, state), count in blocks.most_common())
    return pb.LedgerReply(owners=owned)


def describe_leases(leases: Sequence[Lease], workers: Mapping[int, str], most: int, now: float) -> pb.LedgerReply:
    """Return the part of a ledger reply that names the owner of every block that is held or in flight.

    A block that several leases share is counted for the oldest of them, so that the sums agree with the counts.

    Args:
        leases: all leases.
        workers: ids of workers by session.
        most: describe at most this many leases, oldest first, and only count the others. 0 describes all.
        now: time on the ledger's clock, in seconds.
    """
    reply = pb.LedgerReply()
    seen: set[int] = set()
    for lease in sorted(leases, key=lambda lease: lease.created):
        slots = lease.slots()
        new_slots = len(set(slots) - seen)
        seen.update(slots)
        if most and len(reply.leases) == most:
            reply.leases_left_out += 1
            reply.blocks_left_out += new_slots
        else:
            reply.leases.append(_describe(lease, workers, len(slots) - new_slots, now))
    return reply


def _describe(lease: Lease, workers: Mapping[int, str], shared: int, now: float) -> pb.LeaseInfo:
    info = pb.LeaseInfo(
        key=key_to_pb(lease.key),
        state=lease.state.value,
        owner=workers.get(lease.owner, "gone"),
        writer="" if lease.writer == NOBODY else workers.get(lease.writer, "gone"),
        blocks=len(lease.slots()),
        age_ms=round((now - lease.created) * 1000),
        expires_in_ms=0 if math.isinf(lease.deadline) else max(0, round((lease.deadline - now) * 1000)),
        shared_blocks=shared,
        filled_tokens=lease.filled_tokens,
        token_count=lease.token_count,
    )
    for group, table in zip(lease.layout.groups, lease.tables):
        info.blocks_by_group[group.shape.name] += len(table) - table.count(NO_SLOT)
    return info
