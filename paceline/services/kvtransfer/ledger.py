"""The rules of who may touch which block: leases, their deadlines and generations, and the cache of sealed blocks.

Pure: no clock, no I/O. `now` is in seconds of one monotonic clock; `session` names one stay of a worker. A call that
raises has changed nothing, except that it may have ended what was over: an expired lease, or one that drained; and that
the key of a reservation for which there were no blocks is used up.

    reserve ──▶ RESERVED ──open──▶ FILLING ──fill──▶ FILLED ──adopt──▶ ACTIVE ──release──▶ (gone)
                   └──────────────────────release──────────────────────────────────────────▶ (gone)

A lease that ends while a worker may still touch its blocks is DRAINING: nobody may act on it, but the blocks stay as
they are until that worker says that it is done, or its session has ended. This holds for a lease that runs out, too.

Errors: InvalidRequestError for what can never work, BusyError where blocks are missing now, StaleError where somebody
else owns the lease now, UnknownHoldError where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.block_pool import BlockEvent, BlockPool, Counts
from paceline.core.cache_policy.base import CachePolicy
from paceline.core.errors import BusyError, InvalidRequestError
from paceline.core.kv_layout import BASE_TOKENS, NO_SLOT, KVLayout
from paceline.core.prefix import match_prefix
from paceline.core.types import Key
from paceline.services.kvtransfer import block_tables
from paceline.services.kvtransfer.claim import Claim, claimed_places, claimed_slots, restored_lease
from paceline.services.kvtransfer.lease import NOBODY, TRANSFER, Lease, State, UnknownLeaseError, held_slots
from paceline.services.kvtransfer.lease_book import LeaseBook
from paceline.services.kvtransfer.places import place_of


class Ledger:
    """The blocks of one arena.

    free + held + in flight + cached == total after every call; `check` proves it.

    Args:
        policy: see `BlockPool`.
    """

    def __init__(self, layout: KVLayout, slots: int, lease_seconds: float, policy: CachePolicy | None = None) -> None:
        self.queried_tokens = 0
        """Tokens so far that could have been found in the cache."""
        self.cached_tokens = 0
        """Tokens so far that were."""
        self._layout = layout
        self._lease_seconds = lease_seconds
        self._pool = BlockPool(slots, len(layout.groups), policy)
        self._book = LeaseBook(layout, self._pool)

    # ---- the life of a lease

    def reserve(
        self,
        session: int,
        key: Key,
        hashes: Sequence[bytes],
        token_count: int,
        max_cached_tokens: int,
        now: float,
        priority: int = 0,
    ) -> Lease:
        """Makes a lease: cached blocks of the longest known prefix, then fresh ones up to `token_count` tokens.

        Whoever met BusyError asks again under a higher generation: were the refused reservation to come a second time,
        when there are blocks, nobody would know of its lease.

        Args:
            hashes: chain of the context, one hash each BASE_TOKENS tokens.
            max_cached_tokens: reuse no more than this.
            priority: of the request; a lower one is more urgent, so that its blocks stay cached longer.
        """
        self._book.check_new(key, now)
        block_tables.check_hashes(hashes)
        if len(hashes) * BASE_TOKENS > token_count:
            raise InvalidRequestError(f"{len(hashes)} hashes cover more than the {token_count} tokens to reserve")
        block_tables.check_fits(self._pool, self._layout.slots_for(token_count), token_count)
        cached, tables = match_prefix(self._layout, self._pool.find, hashes, max_cached_tokens)
        reused = held_slots(tables)
        missing = block_tables.missing_blocks(self._layout, tables, token_count)
        try:
            block_tables.check_available(self._pool, sum(missing), reused)
        except BusyError:
            self._book.forbid(key)
            raise
        self._pool.reuse(reused, priority)
        block_tables.grow(self._pool, tables, missing)
        if session != TRANSFER:
            self.queried_tokens += len(hashes) * BASE_TOKENS
            self.cached_tokens += cached
        lease = Lease(
            key=key,
            first_generation=key.generation,
            state=State.RESERVED,
            owner=session,
            writer=session,
            token_count=token_count,
            filled_tokens=cached,
            context_hash=hashes[cached // BASE_TOKENS - 1] if cached else b"",
            tables=tables,
            priority=priority,
            created=now,
            deadline=now + self._lease_seconds,
        )
        self._book.add(lease)
        return lease

    def pin(self, session: int, key: Key, hashes: Sequence[bytes], now: float) -> Lease:
        """Makes a lease of the cached blocks of the longest known prefix of a context, and of no others: to be read."""
        block_tables.check_hashes(hashes)
        cached, _ = match_prefix(self._layout, self._pool.find, hashes, len(hashes) * BASE_TOKENS)
        return self.reserve(session, key, hashes[: cached // BASE_TOKENS], cached, cached, now)

    def open(self, session: int, key: Key, now: float) -> Lease:
        """Makes the caller the writer of a reserved lease, under the next generation."""
        lease = self._book.find_newest(key, now)
        if lease.state is not State.RESERVED:
            raise InvalidRequestError(f"lease {key} is {lease.state.value}; only a reserved one can be opened")
        self._book.change_hands(lease)
        lease.state, lease.writer = State.FILLING, session
        self._pool.enter_flight(lease.slots())
        return self._renewed(lease, now)

    def seal(self, session: int, key: Key, group: int, first_block: int, hashes: Sequence[bytes], now: float) -> Lease:
        """Publishes full blocks, beginning with `first_block`; hashes[i] names the content up to its block i's end."""
        lease = self._book.find_written(session, key, now)
        table = block_tables.table_of(lease, group)
        block_tables.check_hashes(hashes)
        if first_block + len(hashes) > len(table):
            raise InvalidRequestError(
                f"lease {key} has {len(table)} blocks in group {group}: "
                f"[{first_block}, {first_block + len(hashes)}) cannot be sealed"
            )
        slots = table[first_block : first_block + len(hashes)]
        for block, (slot, digest) in enumerate(zip(slots, hashes), first_block):
            if slot == NO_SLOT:
                raise InvalidRequestError(f"lease {key} has given back block {block} of group {group}")
            if self._pool.name(slot) not in (None, (group, digest)):
                raise InvalidRequestError(f"lease {key}: block {block} of group {group} is sealed with another hash")
        before = block_tables.names_of(self._pool, table[max(0, first_block - 1) : first_block]) or [b""]
        for block, (slot, digest, parent) in enumerate(zip(slots, hashes, [*before, *hashes]), first_block):
            if self._pool.name(slot) is None:
                place = place_of(self._layout, group, block, digest, parent, lease.priority)
                self._pool.seal(slot, group, digest, place)
        return self._renewed(lease, now)

    def fill(self, session: int, key: Key, filled_tokens: int, now: float, context_hash: bytes = b"") -> Lease:
        """The prefill worker is done with it: tokens [0, filled_tokens), named `context_hash`, are in the blocks."""
        self._book.drained(session, key, now)
        lease = self._book.find_written(session, key, now)
        if lease.state is not State.FILLING:
            raise InvalidRequestError(f"lease {key} is {lease.state.value}; only an opened one can be filled")
        if not lease.filled_tokens <= filled_tokens <= lease.token_count:
            raise InvalidRequestError(
                f"lease {key}: filled_tokens must be within [{lease.filled_tokens}, {lease.token_count}], "
                f"not {filled_tokens}"
            )
        lease.filled_tokens, lease.context_hash = filled_tokens, context_hash
        lease.state, lease.writer = State.FILLED, NOBODY
        return self._renewed(lease, now)

    def adopt(self, session: int, key: Key, now: float) -> Lease:
        """Makes the caller the owner and writer of a filled lease, under the next generation."""
        lease = self._book.find_newest(key, now)
        if lease.state is not State.FILLED:
            raise InvalidRequestError(f"lease {key} is {lease.state.value}; only a filled one can be adopted")
        self._book.change_hands(lease)
        lease.state, lease.owner, lease.writer = State.ACTIVE, session, session
        self._pool.leave_flight(lease.slots())
        return self._renewed(lease, now)

    def extend(self, session: int, key: Key, token_count: int, now: float) -> Lease:
        """Grows the tables to cover `token_count` tokens, in all groups or in none."""
        lease = self._book.find_written(session, key, now)
        missing = block_tables.missing_blocks(self._layout, lease.tables, token_count)
        block_tables.check_fits(self._pool, sum(missing) + len(lease.slots()), token_count)
        block_tables.check_available(self._pool, sum(missing))
        fresh = block_tables.grow(self._pool, lease.tables, missing)
        if lease.in_flight:
            self._pool.enter_flight(fresh)
        lease.token_count = max(lease.token_count, token_count)
        return self._renewed(lease, now)

    def trim(self, session: int, key: Key, group: int, first_kept_block: int, now: float) -> Lease:
        """Gives back the blocks of a windowed group before `first_kept_block`."""
        lease = self._book.find_written(session, key, now)
        table = block_tables.table_of(lease, group)
        if self._layout.groups[group].shape.window == 0:
            raise InvalidRequestError(f"group {group} has full attention: none of its blocks can be given back")
        if first_kept_block > len(table):
            raise InvalidRequestError(f"lease {key} has only {len(table)} blocks in group {group}")
        behind = [slot for slot in reversed(table[:first_kept_block]) if slot != NO_SLOT]
        table[:first_kept_block] = [NO_SLOT] * first_kept_block
        if lease.in_flight:
            self._pool.leave_flight(behind)
        self._pool.give_back(behind)
        return self._renewed(lease, now)

    def renew(self, session: int, key: Key, now: float) -> Lease:
        """Restarts the lease. The owner may do so with any generation since it reserved: it learns newer ones late."""
        return self._renewed(self._book.find_own(session, key, now), now)

    def release(self, session: int, key: Key, now: float) -> None:
        """Ends the lease, by its writer or by its owner; the second time it does nothing.

        A release that comes before the reserve, open or adopt that it takes back makes that one stale. Where another
        worker is writing, the blocks drain until that one is done.
        """
        self._book.drained(session, key, now)
        try:
            lease = self._book.find_own(session, key, now)
        except UnknownLeaseError:
            self._book.forbid(key)
            return
        self._book.release(lease, session)

    # ---- the end of this service, and another one's beginning

    def names(self, lease: Lease) -> list[list[bytes]]:
        """As the lease's tables: the hashes of sealed blocks, empty for others."""
        return [block_tables.names_of(self._pool, table) for table in lease.tables]

    def restore(self, claims: Sequence[Claim], now: float) -> None:
        """Takes over, into a new ledger, what workers hold from the time of another one. All else is free.

        Raises:
            ContradictionError: not all claims can be true. Nothing is taken over then.
        """
        slots = claimed_slots(self._layout, self._pool.counts().total, claims)
        self._pool.restore(slots, claimed_places(self._layout, claims))
        for claim in claims:
            self._book.restore(restored_lease(claim, now, self._lease_seconds))

    # ---- time and death

    def lose_session(self, session: int, now: float) -> None:
        """A worker is gone: what it owned or wrote ends, after a grace in which it may still touch the blocks."""
        self._book.lose_session(session, now)

    def expire(self, now: float) -> None:
        """End every lease whose time is over."""
        self._book.expire(now)

    def take_overdue(self) -> list[Key]:
        """Leases that ended since the last call because nobody renewed or released them."""
        return self._book.take_overdue()

    # ---- what observers see

    def find(self, key: Key, now: float) -> Lease:
        """The lease, for reading, if it has not ended and `key` is not from before its time."""
        return self._book.find(key, now)

    def slot_of(self, group: int, digest: bytes) -> int | None:
        """The reusable block with this content."""
        return self._pool.find(group, digest)

    def hash_of(self, slot: int) -> bytes | None:
        """The name of a sealed block's content."""
        name = self._pool.name(slot)
        return None if name is None else name[1]

    def counts(self) -> Counts:
        return self._pool.counts()

    def leases(self) -> list[Lease]:
        """All leases, for reading."""
        return list(self._book)

    @property
    def expired_leases(self) -> int:
        """Number of leases so far whose time or session ended before they were released."""
        return self._book.expired

    @property
    def evicted_blocks(self) -> int:
        return self._pool.evicted

    @property
    def event_count(self) -> int:
        """Events so far: the number of the next one."""
        return self._pool.event_count

    def take_events(self) -> list[BlockEvent]:
        """Blocks that became or ceased to be reusable since the last call; the last has number `event_count` - 1."""
        return self._pool.take_events()

    def reusable(self) -> list[list[bytes]]:
        """For each group the names of all blocks that a reservation could reuse now."""
        return self._pool.reusable()

    def check(self) -> list[str]:
        """Proves counts, owners, references and index; returns a sentence for everything that is wrong."""
        return self._book.check()

    def _renewed(self, lease: Lease, now: float) -> Lease:
        lease.deadline = now + self._lease_seconds
        return lease
