"""The ledger: by leases, it decides which worker may touch each block. It also caches sealed blocks.

Pure: no clock, no I/O. `now` is in seconds of one monotonic clock. `session` names one connection of a worker, from
attaching to leaving. A call that raises changes nothing, with two exceptions: it may end leases that have expired or
have drained, and a reservation that fails because blocks are missing uses up its key.

    reserve ──▶ RESERVED ──open──▶ FILLING ──fill──▶ FILLED ──adopt──▶ ACTIVE ──release──▶ (gone)
                   └──────────────────────release──────────────────────────────────────────▶ (gone)

A lease that ends, or expires, while a worker may still touch its blocks is DRAINING. This worker may still seal blocks
that it has written; no other operation on the lease is allowed. Its blocks are given back when that worker says that it
is done, or after its session has ended.

Errors: InvalidRequestError for an operation that can never work, BusyError if too few blocks are available now,
StaleError if another worker owns the lease now, UnknownLeaseError if there is no such lease.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.core.block_counts import Counts
from paceline.core.block_pool import BlockEvent, BlockPool
from paceline.core.cache_policy.base import CachePolicy, HintCounts
from paceline.core.cache_policy.hints import Hint
from paceline.core.cache_policy.ranking import Block, Name
from paceline.core.context import Tail
from paceline.core.errors import BusyError, InvalidRequestError
from paceline.core.kv_layout import BASE_TOKENS, NO_SLOT, KVLayout
from paceline.core.prefix import match_prefix
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger import block_tables
from paceline.services.kvtransfer.ledger.block_tables import place_of
from paceline.services.kvtransfer.ledger.claim import Claim, claimed_places, claimed_slots, restored_lease
from paceline.services.kvtransfer.ledger.hints import EarlyHints
from paceline.services.kvtransfer.ledger.lease import NOBODY, TRANSFER, Lease, State, UnknownLeaseError, held_slots
from paceline.services.kvtransfer.ledger.lease_book import LeaseBook
from paceline.services.kvtransfer.ledger.owners import Lookups


class Ledger:
    """The blocks of one arena and their leases.

    After every call free + held + in flight + cached == total. `check` verifies this.

    Args:
        slots: number of blocks.
        lease_seconds: time after which a lease ends if it is not renewed.
        policy: chooses the blocks to evict; by default the least recently used block is evicted.
    """

    def __init__(self, layout: KVLayout, slots: int, lease_seconds: float, policy: CachePolicy | None = None) -> None:
        self.lookups = {False: Lookups(), True: Lookups()}
        """Lookups by workers' reservations: under False lookups of KV, under True lookups of encodings."""
        self.asleep = False
        """Whether the arena has no memory, so that no block may be reserved."""
        self._layout = layout
        self._lease_seconds = lease_seconds
        self._pool = BlockPool(slots, len(layout.all_groups), policy)
        self._book = LeaseBook(self._pool)
        self._early_hints = EarlyHints()

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
        encoding: bool = False,
        is_lookup: bool = True,
        tails: Sequence[Tail] = (),
    ) -> Lease:
        """Make a lease for `token_count` tokens: the cached blocks of the longest cached prefix, and new blocks for the
        rest.

        After BusyError the caller must use a higher generation. Otherwise the refused message might arrive twice, and
        make a lease that nobody knows of when blocks are available.

        Args:
            hashes: chain of the context, one hash for each BASE_TOKENS tokens.
            max_cached_tokens: reuse at most this many tokens.
            priority: priority of the request; lower is more urgent. Some policies cache urgent blocks longer.
            encoding: whether the context is an encoding, rather than the tokens of a request.
            is_lookup: whether to count the reservation in the rate of cache hits.
            tails: tails of the context that may be cached. The lease takes over the partial blocks of the longest one,
                because its writer will go on writing in them. Other requests do not find these blocks any more.
        """
        layout = self._layout.part(encoding)
        self._book.check_new(key, now)
        block_tables.check_hashes(hashes)
        if len(hashes) * BASE_TOKENS > token_count:
            raise InvalidRequestError(f"{len(hashes)} hashes cover more than the {token_count} tokens to reserve")
        block_tables.check_fits(self._pool, layout.slots_for(token_count), token_count)
        cached, tables = match_prefix(layout, self._pool.find, hashes, max_cached_tokens, tails)
        taken = block_tables.partial_blocks(layout, tables, cached)
        if any(map(self._pool.is_used, taken)):  # because another host reads the blocks
            cached, tables = match_prefix(layout, self._pool.find, hashes, max_cached_tokens)
            taken = []
        reused = held_slots(tables)
        missing = block_tables.missing_blocks(layout, tables, token_count)
        try:
            if self.asleep:
                raise BusyError("all workers of this host sleep, so it has no KV blocks")
            block_tables.check_available(self._pool, sum(missing), reused)
        except BusyError:
            self._book.forbid(key)
            raise
        self._pool.reuse([slot for slot in reused if slot not in taken], priority)
        self._pool.take_over(taken)
        block_tables.grow(self._pool, tables, missing)
        if is_lookup and session != TRANSFER:
            self.lookups[encoding].add(len(hashes) * BASE_TOKENS, cached)
        lease = Lease(
            key=key,
            layout=layout,
            first_generation=key.generation,
            state=State.RESERVED,
            owner=session,
            writer=session,
            token_count=token_count,
            filled_tokens=cached,
            context_hash=_name(cached, hashes, tails),
            tables=tables,
            priority=priority,
            created=now,
            deadline=now + self._lease_seconds,
        )
        self._book.add(lease)
        return lease

    def pin(self, session: int, key: Key, hashes: Sequence[bytes], now: float, encoding: bool = False) -> Lease:
        """Make a lease of only the cached blocks of a context's longest cached prefix, so that they can be read."""
        block_tables.check_hashes(hashes)
        most = len(hashes) * BASE_TOKENS
        cached, _ = match_prefix(self._layout.part(encoding), self._pool.find, hashes, most)
        links = hashes[: cached // BASE_TOKENS]
        return self.reserve(session, key, links, cached, cached, now, encoding=encoding, is_lookup=False)

    def open(self, session: int, key: Key, now: float) -> Lease:
        """Make the caller the writer of a reserved lease, and give the lease its next generation."""
        lease = self._book.find_newest(key, now)
        if lease.state is not State.RESERVED:
            raise InvalidRequestError(f"lease {key} is {lease.state.value}; only a reserved one can be opened")
        self._book.change_hands(lease)
        lease.state, lease.writer = State.FILLING, session
        self._pool.enter_flight(lease.slots())
        return self._renewed(lease, now)

    def seal(self, session: int, key: Key, group: int, first_block: int, hashes: Sequence[bytes], now: float) -> Lease:
        """Publish full blocks. hashes[i] names the context up to the end of block `first_block` + i.

        The lease may be draining, because its writer may not know yet that it was released or has expired.
        """
        lease = self._find_sealed_by(session, key, now)
        slots, before = block_tables.slots_to_seal(self._pool, lease, group, first_block, hashes)
        for block, (slot, digest, parent) in enumerate(zip(slots, hashes, [before, *hashes]), first_block):
            if self._pool.name(slot) is None:
                place = place_of(lease.layout, group, block, digest, parent, lease.priority)
                name = lease.layout.first_group + group, digest
                self._pool.seal(slot, *name, place)
                if (hint := self._early_hints.take(name, now)) is not None:
                    self._pool.expect(*name, hint)
        return self._renewed(lease, now)

    def keep(self, session: int, key: Key, tail: Tail, now: float, copies: Key | None = None) -> Lease:
        """Publish and give back the blocks at a tail of a context that are not full. The writer is done with them.

        The lease may be draining, because its writer may not know yet that it was released or has expired.

        Args:
            copies: key of another lease of the same writer, whose first block of each group is a copy of the block at
                the tail. These copies are published, and the lease keeps its own blocks.
        """
        lease = self._find_sealed_by(session, key, now)
        source = lease if copies is None else self._find_sealed_by(session, copies, now)
        if copies is not None and (source is lease or source.layout is not lease.layout):
            raise InvalidRequestError(f"lease {copies} cannot have copies of blocks of {key}")
        ends = [(index, *divmod(tail.length, group.block_tokens)) for index, group in enumerate(lease.layout.groups)]
        found = []
        for group, block, rest in ends:
            if rest:
                source_block = block if copies is None else 0
                (slot,), _ = block_tables.slots_to_seal(self._pool, source, group, source_block, [tail.name])
                found.append((group, block, source_block, slot))
        for group, block, source_block, slot in found:
            if self._pool.name(slot) is None:
                before = block_tables.name_before(self._pool, lease, group, block)
                place = place_of(lease.layout, group, block, tail.name, before, lease.priority, tail.length)
                self._pool.seal(slot, lease.layout.first_group + group, tail.name, place)
            source.tables[group][source_block] = NO_SLOT
        slots = [slot for *_, slot in reversed(found)]  # states first, because they need the blocks with full attention
        if source.in_flight:
            self._pool.leave_flight(slots)
        self._pool.give_back(slots)
        return self._renewed(lease, now)

    def fill(self, session: int, key: Key, filled_tokens: int, now: float, context_hash: bytes = b"") -> Lease:
        """Note that the prefill worker has written tokens [0, filled_tokens), whose hash is `context_hash`."""
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
        """Make the caller the owner and writer of a filled lease, and give the lease its next generation."""
        lease = self._book.find_newest(key, now)
        if lease.state is not State.FILLED:
            raise InvalidRequestError(f"lease {key} is {lease.state.value}; only a filled one can be adopted")
        self._book.change_hands(lease)
        lease.state, lease.owner, lease.writer = State.ACTIVE, session, session
        self._pool.leave_flight(lease.slots())
        return self._renewed(lease, now)

    def extend(self, session: int, key: Key, token_count: int, now: float) -> Lease:
        """Add blocks to cover `token_count` tokens, in all groups or in none."""
        lease = self._book.find_written(session, key, now)
        missing = block_tables.missing_blocks(lease.layout, lease.tables, token_count)
        block_tables.check_fits(self._pool, sum(missing) + len(lease.slots()), token_count)
        block_tables.check_available(self._pool, sum(missing))
        fresh = block_tables.grow(self._pool, lease.tables, missing)
        if lease.in_flight:
            self._pool.enter_flight(fresh)
        lease.token_count = max(lease.token_count, token_count)
        return self._renewed(lease, now)

    def trim(self, session: int, key: Key, group: int, first_kept_block: int, now: float) -> Lease:
        """Give back the blocks of a windowed group before `first_kept_block`."""
        lease = self._book.find_written(session, key, now)
        table = block_tables.table_of(lease, group)
        if lease.layout.groups[group].shape.window == 0:
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
        """Restart the lease's time. Its owner may use any generation since its reservation, because it learns of newer
        ones late.
        """
        return self._renewed(self._book.find_own(session, key, now), now)

    def release(self, session: int, key: Key, now: float) -> None:
        """End the lease for its writer or owner. A second release does nothing.

        A release may come before the reserve, open or adopt that it cancels. The late operation is then refused as
        stale. If another worker is writing, the blocks drain until that worker is done.
        """
        self._book.drained(session, key, now)
        try:
            lease = self._book.find_own(session, key, now)
        except UnknownLeaseError:
            self._book.forbid(key)
            return
        self._book.release(lease, session)

    # ---- restart of the service

    def names(self, lease: Lease) -> list[list[bytes]]:
        """Return the hash of each block in the lease's tables; b"" for a block that is not sealed."""
        return [block_tables.names_of(self._pool, table) for table in lease.tables]

    def restore(self, claims: Sequence[Claim], now: float) -> None:
        """Take over the leases that workers claim to have from an earlier ledger. All other blocks are free.

        Raises:
            ContradictionError: not all claims can be true. Then the ledger does not change.
        """
        slots = claimed_slots(self._layout, self._pool.counts().total, claims)
        self._pool.restore(slots, claimed_places(self._layout, claims))
        for claim in claims:
            self._book.restore(restored_lease(self._layout, claim, now, self._lease_seconds))

    # ---- leases that end without a release

    def lose_session(self, session: int, now: float) -> None:
        """End the leases that a lost worker owned or wrote, after a time in which it may still touch the blocks."""
        self._book.lose_session(session, now)

    def expire(self, now: float) -> None:
        """End every lease whose deadline has passed."""
        self._book.expire(now)

    def take_overdue(self) -> list[Key]:
        """Return the keys of leases that were not renewed in time, or lost their session, since the last call."""
        return self._book.take_overdue()

    # ---- the cache

    def expect(self, group: int, digest: bytes, hint: Hint, now: float) -> None:
        """Note a hint about the reusable block with this name. If there is none, the hint waits some seconds for the
        block.
        """
        if self._pool.find(group, digest) is None:
            self._early_hints.put((group, digest), hint, now)
        else:
            self._pool.expect(group, digest, hint)

    def forget(self) -> int:
        """Forget all cached blocks that no lease uses. Return how many there were."""
        return len(self._pool.forget())

    # ---- reading the state

    def find(self, key: Key, now: float) -> Lease:
        """Return the lease that has, or had, this key, for reading only. Raises UnknownLeaseError if there is none."""
        return self._book.find(key, now)

    def slot_of(self, group: int, digest: bytes) -> int | None:
        """Return the slot of the reusable block of the group with this number and hash, or None."""
        return self._pool.find(group, digest)

    def hash_of(self, slot: int) -> bytes | None:
        """Return the hash of the block in a slot, or None if it is not sealed."""
        name = self._pool.name(slot)
        return None if name is None else name[1]

    def blocks(self) -> Collection[Block]:
        """Return all reusable blocks, for reading only."""
        return self._pool.blocks()

    def cached(self) -> list[Name]:
        """Return (group number, hash) of each cached block."""
        return self._pool.cached()

    def counts(self) -> Counts:
        return self._pool.counts()

    def leases(self) -> list[Lease]:
        """Return all leases, for reading only."""
        return list(self._book)

    @property
    def expired_leases(self) -> int:
        """Number of leases so far whose deadline passed or whose session ended before they were released."""
        return self._book.expired

    @property
    def hint_counts(self) -> HintCounts:
        return self._pool.hint_counts

    @property
    def evicted_blocks(self) -> int:
        return self._pool.evicted

    @property
    def event_count(self) -> int:
        """Number of block events so far, which is also the number of the next event."""
        return self._pool.event_count

    def take_events(self) -> list[BlockEvent]:
        """Return the events since the last call, of blocks that became or ceased to be reusable.

        The last event has number `event_count` - 1.
        """
        return self._pool.take_events()

    def reusable(self) -> list[list[bytes]]:
        """Return, by the number of the group, the hashes of all blocks that a reservation could reuse now."""
        return self._pool.reusable()

    def reusable_counts(self) -> list[int]:
        """Return, by the number of the group, how many blocks a reservation could reuse now."""
        return self._pool.reusable_counts()

    def check(self) -> list[str]:
        """Check counts, owners, references and index. Return one sentence for each fault."""
        return self._book.check()

    def _find_sealed_by(self, session: int, key: Key, now: float) -> Lease:
        """Return the lease of the writer `session`. It may be draining, because the writer may not know yet."""
        return self._book.find_draining(session, key, now) or self._book.find_written(session, key, now)

    def _renewed(self, lease: Lease, now: float) -> Lease:
        if lease.state is not State.DRAINING:  # draining ends when its writer is done, not at a deadline
            lease.deadline = now + self._lease_seconds
        return lease


def _name(length: int, links: Sequence[bytes], tails: Sequence[Tail]) -> bytes:
    """Return the name of a context's first `length` tokens, which end on a link or at a tail; b"" if there are none."""
    if length % BASE_TOKENS:
        return next(tail.name for tail in tails if tail.length == length)
    return links[length // BASE_TOKENS - 1] if length else b""
