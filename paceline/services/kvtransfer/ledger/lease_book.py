"""The leases of one arena: their owners, their writers, and their ends."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

from paceline.core.block_pool import BlockPool
from paceline.core.errors import InvalidRequestError, StaleError
from paceline.core.kv_layout import slots_tail_first
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.lease import NOBODY, Lease, State, UnknownLeaseError

GRACE_SECONDS = 1.0
"""Seconds for which a worker may still touch its blocks after its session broke."""

_ENDED_KEPT = 1 << 16
"""Number of attempts whose last ended or forbidden generation is remembered, to refuse messages that are late."""


class LeaseBook:
    """Owns the leases, and gives their blocks back to `pool` when they end.

    Times are seconds of one monotonic clock. A lease has ended when its deadline has passed, even if `expire` has not
    run. Its blocks are not given back while its writer lives and may not know of the end. A worker that was stopped for
    longer than a lease, or whose renewals this service did not read for that long, must not write into blocks of
    others.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.expired = 0
        """Number of leases so far whose deadline passed or whose session ended before they were released."""
        self._overdue: list[Key] = []  # keys of the leases that ended in this way since `take_overdue`
        self._pool = pool
        self._live: dict[tuple[str, int], Lease] = {}  # by (request, attempt)
        self._draining: dict[Key, Lease] = {}
        self._ended: OrderedDict[tuple[str, int], int] = OrderedDict()  # last generation by attempt, oldest end first

    def __iter__(self) -> Iterator[Lease]:
        """Yield all leases. Draining leases come last."""
        yield from self._live.values()
        yield from self._draining.values()

    # ---- finding a lease, and the right to act on it

    def check_new(self, key: Key, now: float) -> None:
        """Raise StaleError if a new lease cannot have this key, InvalidRequestError if the attempt has a lease."""
        lease = self._alive(key, now)
        newest = self._ended.get(key[:2], -1) if lease is None else lease.key.generation
        if key.generation <= newest:
            raise StaleError(f"{key} is too old for a new lease: generation {newest} has been seen")
        if lease is not None:
            raise InvalidRequestError(f"lease {lease.key} exists; release it before you reserve {key}")

    def add(self, lease: Lease) -> None:
        self._live[lease.key[:2]] = lease

    def restore(self, lease: Lease) -> None:
        """Add a lease that is ACTIVE or DRAINING and whose blocks were restored in the pool already."""
        if lease.state is State.DRAINING:
            self._pool.enter_flight(lease.slots())
            self._draining[lease.key] = lease
        else:
            self.add(lease)

    def find(self, key: Key, now: float) -> Lease:
        """Return the lease that has, or had, this key. Raises UnknownLeaseError if there is none."""
        lease = self._alive(key, now)
        if lease is None or not lease.first_generation <= key.generation <= lease.key.generation:
            raise UnknownLeaseError(f"there is no lease {key}: it was never made, was released, or its time ended")
        return lease

    def find_newest(self, key: Key, now: float) -> Lease:
        """Return the lease if `key` has its newest generation. Raises StaleError otherwise."""
        lease = self.find(key, now)
        if key.generation < lease.key.generation:
            raise StaleError(f"lease {key} changed hands; its generation is {lease.key.generation} now")
        return lease

    def find_written(self, session: int, key: Key, now: float) -> Lease:
        """Return the lease if `session` is its writer. Raises StaleError otherwise, or InvalidRequestError if the lease
        is filled.
        """
        lease = self.find_newest(key, now)
        if lease.writer == NOBODY:
            raise InvalidRequestError(f"lease {key} is filled; adopt it first")
        if lease.writer != session:
            raise StaleError(f"lease {key} is written by another worker")
        return lease

    def find_draining(self, session: int, key: Key, now: float) -> Lease | None:
        """Return the draining lease that has this key and whose writer is `session`, or None."""
        self._alive(key, now)  # a lease whose deadline has passed unnoticed begins to drain here
        lease = self._draining.get(key)
        return None if lease is None or lease.writer != session else lease

    def find_own(self, session: int, key: Key, now: float) -> Lease:
        """Return the lease if `session` owns or writes it. Raises StaleError otherwise.

        The owner may use an older generation, because it learns of a new generation late.
        """
        lease = self.find(key, now)
        is_writer = session == lease.writer and key.generation == lease.key.generation
        if session != lease.owner and not is_writer:
            raise StaleError(f"lease {key} belongs to another worker")
        return lease

    def _alive(self, key: Key, now: float) -> Lease | None:
        lease = self._live.get(key[:2])
        if lease is not None and lease.deadline <= now:
            self._expire(lease)
            return None
        return lease

    def change_hands(self, lease: Lease) -> None:
        """Give a lease its next generation. Raises StaleError if this generation was released in advance."""
        key = lease.key._replace(generation=lease.key.generation + 1)
        if key.generation <= self._ended.get(key[:2], -1):
            raise StaleError(f"{key} was given back before it was requested")
        lease.key = key

    # ---- the ends of a lease

    def forbid(self, key: Key) -> None:
        """Refuse new leases of this attempt up to this generation from now on.

        The generation has ended, was refused, or was released in advance. A message that comes late or twice must not
        make a lease that is unknown to every worker.
        """
        name = key[:2]
        self._ended[name] = max(key.generation, self._ended.get(name, -1))
        self._ended.move_to_end(name)
        if len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)

    def release(self, lease: Lease, session: int) -> None:
        """End a lease for its owner or writer. If another worker writes the lease, it drains until this writer is
        done.
        """
        if lease.writer in (NOBODY, session):
            self._forget(lease)
            self._give_back(lease)
        else:
            self._drain(lease, lease.writer)

    def drained(self, session: int, key: Key, now: float) -> None:
        """End the draining of a lease, because its writer is done with the blocks.

        The key may be older than the lease's, because the writer may not know that its reservation was adopted.
        """
        self._alive(key, now)  # a lease whose deadline has passed unnoticed begins to drain here
        for lease in [lease for lease in self._draining.values() if lease.key[:2] == key[:2]]:
            if lease.writer == session and lease.first_generation <= key.generation <= lease.key.generation:
                self._end_drain(lease)

    def lose_session(self, session: int, now: float) -> None:
        """End the leases that a worker owned or wrote, because its session has ended.

        Their blocks drain first: for GRACE_SECONDS, or until another writer of them is done.
        """
        for lease in list(self._live.values()):
            if session in (lease.owner, lease.writer):
                self._note_overdue(lease)
                self._drain(lease, session if lease.writer == NOBODY else lease.writer)
        for lease in self._draining.values():
            if lease.writer == session:
                lease.deadline = min(lease.deadline, now + GRACE_SECONDS)

    def expire(self, now: float) -> None:
        """End every lease whose deadline has passed."""
        for lease in [lease for lease in self if lease.deadline <= now]:
            if lease.state is State.DRAINING:
                self._end_drain(lease)
            else:
                self._expire(lease)

    def take_overdue(self) -> list[Key]:
        """Return the keys of leases that were not renewed in time, or lost their session, since the last call."""
        overdue, self._overdue = self._overdue, []
        return overdue

    def _expire(self, lease: Lease) -> None:
        self._note_overdue(lease)
        if lease.writer == NOBODY:
            self._forget(lease)
            self._give_back(lease)
        else:
            self._drain(lease, lease.writer)

    def _note_overdue(self, lease: Lease) -> None:
        self.expired += 1
        self._overdue.append(lease.key)

    def _drain(self, lease: Lease, writer: int) -> None:
        self._forget(lease)
        if not lease.in_flight:
            self._pool.enter_flight(lease.slots())
        # Draining has no deadline. It ends when the writer says so, or after its session has ended.
        lease.state, lease.writer, lease.deadline = State.DRAINING, writer, math.inf
        self._draining[lease.key] = lease

    def _end_drain(self, lease: Lease) -> None:
        del self._draining[lease.key]
        self._give_back(lease)

    def _forget(self, lease: Lease) -> None:
        del self._live[lease.key[:2]]
        self.forbid(lease.key)

    def _give_back(self, lease: Lease) -> None:
        if lease.in_flight:
            self._pool.leave_flight(lease.slots())
        self._pool.give_back(slots_tail_first(lease.layout.groups, lease.tables))

    def check(self) -> list[str]:
        """Check leases and pool against each other. Return one sentence for each fault."""
        wrong = []
        total = self._pool.counts().total
        references, flights = [0] * total, [0] * total
        for lease in self:
            for slot in lease.slots():
                references[slot] += 1
                flights[slot] += lease.in_flight
            if [len(table) for table in lease.tables] != [
                group.blocks_for(lease.token_count) for group in lease.layout.groups
            ]:
                wrong.append(f"the tables of lease {lease.key} do not cover its {lease.token_count} tokens")
            if (lease.state is State.DRAINING) != (self._draining.get(lease.key) is lease):
                wrong.append(f"lease {lease.key} is {lease.state.value} in the wrong place")
        return wrong + self._pool.check(references, flights)
