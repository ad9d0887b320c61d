"""Who may touch which block: holds, their leases and generations, and the cache of sealed blocks.

Pure: no clock, no I/O. `now` is in seconds of one monotonic clock; `session` names one stay of a worker. A call that
raises has changed nothing, except that it may have ended what was over: an expired hold, or one that drained; and that
the key of a reservation for which there were no blocks is used up.

    reserve ──▶ RESERVED ──open──▶ FILLING ──fill──▶ FILLED ──adopt──▶ ACTIVE ──release──▶ (gone)
                   └──────────────────────release──────────────────────────────────────────▶ (gone)

A hold that ends while a worker may still touch its blocks is DRAINING: nobody may act on it, but the blocks stay as
they are until that worker says that it is done, or its session has ended. This holds for a lease that ends, too.

Errors: InvalidRequestError for what can never work, BusyError where blocks are missing now, StaleError where somebody
else owns the hold now, UnknownHoldError where there is none.
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
from paceline.services.kvtransfer.claim import Claim, claimed_places, claimed_slots, restored_hold
from paceline.services.kvtransfer.hold import NOBODY, TRANSFER, Hold, State, UnknownHoldError, held_slots
from paceline.services.kvtransfer.hold_book import HoldBook
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
        self._book = HoldBook(layout, self._pool)

    # ---- the life of a hold

    def reserve(
        self,
        session: int,
        key: Key,
        hashes: Sequence[bytes],
        token_count: int,
        max_cached_tokens: int,
        now: float,
        priority: int = 0,
    ) -> Hold:
        """Makes a hold: cached blocks of the longest known prefix, then fresh ones up to `token_count` tokens.

        Whoever met BusyError asks again under a higher generation: were the refused reservation to come a second time,
        when there are blocks, nobody would know of its hold.

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
        hold = Hold(
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
        self._book.add(hold)
        return hold

    def pin(self, session: int, key: Key, hashes: Sequence[bytes], now: float) -> Hold:
        """Makes a hold of the cached blocks of the longest known prefix of a context, and of no others: to be read."""
        block_tables.check_hashes(hashes)
        cached, _ = match_prefix(self._layout, self._pool.find, hashes, len(hashes) * BASE_TOKENS)
        return self.reserve(session, key, hashes[: cached // BASE_TOKENS], cached, cached, now)

    def open(self, session: int, key: Key, now: float) -> Hold:
        """Makes the caller the writer of a reserved hold, under the next generation."""
        hold = self._book.find_newest(key, now)
        if hold.state is not State.RESERVED:
            raise InvalidRequestError(f"hold {key} is {hold.state.value}; only a reserved one can be opened")
        self._book.change_hands(hold)
        hold.state, hold.writer = State.FILLING, session
        self._pool.enter_flight(hold.slots())
        return self._renewed(hold, now)

    def seal(self, session: int, key: Key, group: int, first_block: int, hashes: Sequence[bytes], now: float) -> Hold:
        """Publishes full blocks, beginning with `first_block`; hashes[i] names the content up to its block i's end."""
        hold = self._book.find_written(session, key, now)
        table = block_tables.table_of(hold, group)
        block_tables.check_hashes(hashes)
        if first_block + len(hashes) > len(table):
            raise InvalidRequestError(
                f"hold {key} has {len(table)} blocks in group {group}: "
                f"[{first_block}, {first_block + len(hashes)}) cannot be sealed"
            )
        slots = table[first_block : first_block + len(hashes)]
        for block, (slot, digest) in enumerate(zip(slots, hashes), first_block):
            if slot == NO_SLOT:
                raise InvalidRequestError(f"hold {key} has given back block {block} of group {group}")
            if self._pool.name(slot) not in (None, (group, digest)):
                raise InvalidRequestError(f"hold {key}: block {block} of group {group} is sealed with another hash")
        before = block_tables.names_of(self._pool, table[max(0, first_block - 1) : first_block]) or [b""]
        for block, (slot, digest, parent) in enumerate(zip(slots, hashes, [*before, *hashes]), first_block):
            if self._pool.name(slot) is None:
                place = place_of(self._layout, group, block, digest, parent, hold.priority)
                self._pool.seal(slot, group, digest, place)
        return self._renewed(hold, now)

    def fill(self, session: int, key: Key, filled_tokens: int, now: float, context_hash: bytes = b"") -> Hold:
        """The prefill worker is done with it: tokens [0, filled_tokens), named `context_hash`, are in the blocks."""
        self._book.drained(session, key, now)
        hold = self._book.find_written(session, key, now)
        if hold.state is not State.FILLING:
            raise InvalidRequestError(f"hold {key} is {hold.state.value}; only an opened one can be filled")
        if not hold.filled_tokens <= filled_tokens <= hold.token_count:
            raise InvalidRequestError(
                f"hold {key}: filled_tokens must be within [{hold.filled_tokens}, {hold.token_count}], "
                f"not {filled_tokens}"
            )
        hold.filled_tokens, hold.context_hash = filled_tokens, context_hash
        hold.state, hold.writer = State.FILLED, NOBODY
        return self._renewed(hold, now)

    def adopt(self, session: int, key: Key, now: float) -> Hold:
        """Makes the caller the owner and writer of a filled hold, under the next generation."""
        hold = self._book.find_newest(key, now)
        if hold.state is not State.FILLED:
            raise InvalidRequestError(f"hold {key} is {hold.state.value}; only a filled one can be adopted")
        self._book.change_hands(hold)
        hold.state, hold.owner, hold.writer = State.ACTIVE, session, session
        self._pool.leave_flight(hold.slots())
        return self._renewed(hold, now)

    def extend(self, session: int, key: Key, token_count: int, now: float) -> Hold:
        """Grows the tables to cover `token_count` tokens, in all groups or in none."""
        hold = self._book.find_written(session, key, now)
        missing = block_tables.missing_blocks(self._layout, hold.tables, token_count)
        block_tables.check_fits(self._pool, sum(missing) + len(hold.slots()), token_count)
        block_tables.check_available(self._pool, sum(missing))
        fresh = block_tables.grow(self._pool, hold.tables, missing)
        if hold.in_flight:
            self._pool.enter_flight(fresh)
        hold.token_count = max(hold.token_count, token_count)
        return self._renewed(hold, now)

    def trim(self, session: int, key: Key, group: int, first_kept_block: int, now: float) -> Hold:
        """Gives back the blocks of a windowed group before `first_kept_block`."""
        hold = self._book.find_written(session, key, now)
        table = block_tables.table_of(hold, group)
        if self._layout.groups[group].shape.window == 0:
            raise InvalidRequestError(f"group {group} has full attention: none of its blocks can be given back")
        if first_kept_block > len(table):
            raise InvalidRequestError(f"hold {key} has only {len(table)} blocks in group {group}")
        behind = [slot for slot in reversed(table[:first_kept_block]) if slot != NO_SLOT]
        table[:first_kept_block] = [NO_SLOT] * first_kept_block
        if hold.in_flight:
            self._pool.leave_flight(behind)
        self._pool.give_back(behind)
        return self._renewed(hold, now)

    def renew(self, session: int, key: Key, now: float) -> Hold:
        """Restarts the lease. The owner may do so with any generation since it reserved: it learns newer ones late."""
        return self._renewed(self._book.find_own(session, key, now), now)

    def release(self, session: int, key: Key, now: float) -> None:
        """Ends the hold, by its writer or by its owner; the second time it does nothing.

        A release that comes before the reserve, open or adopt that it takes back makes that one stale. Where another
        worker is writing, the blocks drain until that one is done.
        """
        self._book.drained(session, key, now)
        try:
            hold = self._book.find_own(session, key, now)
        except UnknownHoldError:
            self._book.forbid(key)
            return
        self._book.release(hold, session)

    # ---- the end of this service, and another one's beginning

    def names(self, hold: Hold) -> list[list[bytes]]:
        """As the hold's tables: the hashes of sealed blocks, empty for others."""
        return [block_tables.names_of(self._pool, table) for table in hold.tables]

    def restore(self, claims: Sequence[Claim], now: float) -> None:
        """Takes over, into a new ledger, what workers hold from the time of another one. All else is free.

        Raises:
            ContradictionError: not all claims can be true. Nothing is taken over then.
        """
        slots = claimed_slots(self._layout, self._pool.counts().total, claims)
        self._pool.restore(slots, claimed_places(self._layout, claims))
        for claim in claims:
            self._book.restore(restored_hold(claim, now, self._lease_seconds))

    # ---- time and death

    def lose_session(self, session: int, now: float) -> None:
        """A worker is gone: what it owned or wrote ends, after a grace in which it may still touch the blocks."""
        self._book.lose_session(session, now)

    def expire(self, now: float) -> None:
        """Ends every hold whose lease is over."""
        self._book.expire(now)

    def take_overdue(self) -> list[Key]:
        """Holds that ended since the last call because nobody renewed or released them."""
        return self._book.take_overdue()

    # ---- what observers see

    def find(self, key: Key, now: float) -> Hold:
        """The hold, for reading, if it has not ended and `key` is not from before its time."""
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

    def holds(self) -> list[Hold]:
        """All holds, for reading."""
        return list(self._book)

    @property
    def expired_holds(self) -> int:
        """Holds so far whose lease or session ended before they were released."""
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

    def _renewed(self, hold: Hold, now: float) -> Hold:
        hold.deadline = now + self._lease_seconds
        return hold
