"""The ledger under any sequence of calls, checked by what workers find in the memory.

The test owns the arena's memory, one word per slot. Workers write into blocks that they believe are theirs. Some of
them do not know yet that their lease was cancelled or has expired, or that their session is lost. If the ledger gave a
block to another lease too early, a worker would find a foreign word in its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.core.errors import BusyError, InvalidRequestError, StaleError
from paceline.core.kv_layout import NO_SLOT
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.lease import Lease, State, UnknownLeaseError, held_slots
from paceline.services.kvtransfer.ledger.lease_book import GRACE_SECONDS
from paceline.services.kvtransfer.ledger.ledger import Ledger
from paceline.services.kvtransfer.ledger.owners import count_groups
from tests.services.kvtransfer.kv_story import LAYOUT, Story, Worker, tail_of
from tests.services.kvtransfer.kv_toolkit import LEASE, chain

SLOTS = 14
REQUESTS = ("p", "q", "r")
CONTEXTS = st.sampled_from(("abcdefgh", "abcdxy", "uvwxyz")).flatmap(
    lambda text: st.integers(0, len(text)).map(lambda length: text[:length])
)
"""Contexts with common prefixes. Each letter stands for 16 tokens."""

picks = st.integers(0, 1 << 16)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = Ledger(LAYOUT, SLOTS, LEASE)
        self.memory: list[object] = [None] * SLOTS
        self.sessions = [1, 2, 3]
        self.workers: list[Worker] = []
        self.stories: dict[str, Story] = {}  # the newest of each request
        self.keys: list[Key] = []  # all keys that leases have had, newest last
        self.serial = 0

    def live(self, *states: State) -> list[Lease]:
        return [
            lease
            for lease in self.ledger.leases()
            if lease.state is not State.DRAINING and lease.deadline > self.now and (not states or lease.state in states)
        ]

    def session(self, pick: int) -> int:
        return self.sessions[pick % len(self.sessions)]

    def worker(self, pick: int) -> Worker:
        return self.workers[pick % len(self.workers)]

    def begin(self, lease: Lease, session: int) -> None:
        """Let `session` touch the blocks of `lease` from now on, and write to them at once."""
        story = self.stories[lease.key.request_id]
        assert lease.tables == story.tables
        self.workers.append(Worker(story, session, lease.key, math.inf, lease.state is State.FILLING))
        self.keys.append(lease.key)
        self.write(story)

    def write(self, story: Story) -> None:
        """Write into every block that is not sealed, whatever the ledger's state is by now."""
        for index, table in enumerate(story.tables):
            for block, slot in enumerate(table):
                if slot != NO_SLOT and block >= story.sealed[index]:
                    self.memory[slot] = story.words[slot] = (story.serial, index, block)

    def end(self, key: Key, session: int) -> None:
        """Note that `session` no longer touches the blocks of this attempt."""
        self.workers = [one for one in self.workers if (one.key[:2], one.session) != (key[:2], session)]

    # ---- the life of a lease

    @rule(
        request=st.sampled_from(REQUESTS),
        context=CONTEXTS,
        extra=st.integers(0, 40),
        limit=st.sampled_from((0, 63, 64, 1000)),
        encoding=st.sampled_from((False, False, True)),
        pick=picks,
    )
    def reserve(self, request: str, context: str, extra: int, limit: int, encoding: bool, pick: int) -> None:
        newest = max((key.generation for key in self.keys if key.request_id == request), default=0)
        tokens = len(context) * 16 + extra
        exists = any(lease.key.request_id == request for lease in self.live())
        before, layout = self.ledger.counts(), LAYOUT.part(encoding)
        key = Key(request, 1, newest + 1)
        limits = (tokens, limit, self.now)
        try:
            tails = () if encoding else [tail_of(context, letters) for letters in range(len(context))]
            lease = self.ledger.reserve(
                self.session(pick), key, chain(context), *limits, encoding=encoding, tails=tails
            )
        except InvalidRequestError:
            assert exists or layout.slots_for(tokens) > SLOTS
            return
        except BusyError:
            assert not exists
            assert layout.slots_for(tokens) > before.free
            self.keys.append(key)  # the key is used up
            return
        assert not exists
        cached = lease.filled_tokens
        assert cached <= limit
        at_tail = next((tail.name for tail in tails if tail.length == cached), None)
        assert cached % layout.alignment == 0 or at_tail is not None
        self.serial += 1
        story = Story(self.serial, request, context, [list(table) for table in lease.tables], layout)
        self.stories[request] = story
        for index, group in enumerate(layout.groups):
            assert len(lease.tables[index]) == group.blocks_for(tokens)
            story.sealed[index] = cached // group.block_tokens
            for block in range(group.first_needed_block(cached), story.sealed[index]):
                slot = lease.tables[index][block]
                assert self.memory[slot] == story.name(index, block), "a reused block has other content"
                story.words[slot] = self.memory[slot]
            if at_tail is not None:
                taken = lease.tables[index][story.sealed[index]]
                assert self.memory[taken] == (index, at_tail), "a block at a tail has other content"
        self.begin(lease, self.session(pick))

    @precondition(lambda self: self.live(State.RESERVED))
    @rule(pick=picks, who=picks)
    def open(self, pick: int, who: int) -> None:
        leases = self.live(State.RESERVED)
        lease = leases[pick % len(leases)]
        self.end(lease.key, lease.owner)  # the owner leaves the blocks to the writer
        self.begin(self.ledger.open(self.session(who), lease.key, self.now), self.session(who))

    @precondition(lambda self: any(worker.opened for worker in self.workers))
    @rule(pick=picks)
    def fill(self, pick: int) -> None:
        writers = [worker for worker in self.workers if worker.opened]
        worker = writers[pick % len(writers)]
        self.workers.remove(worker)
        try:
            lease = self.ledger.fill(worker.session, worker.key, len(worker.story.context) * 16, self.now)
        except UnknownLeaseError:  # the lease was cancelled meanwhile
            return
        assert lease.state is State.FILLED

    @precondition(lambda self: self.live(State.FILLED))
    @rule(pick=picks, who=picks)
    def adopt(self, pick: int, who: int) -> None:
        leases = self.live(State.FILLED)
        lease = leases[pick % len(leases)]
        self.begin(self.ledger.adopt(self.session(who), lease.key, self.now), self.session(who))

    @precondition(lambda self: self.live())
    @rule(pick=picks, older=st.booleans())
    def owner_releases(self, pick: int, older: bool) -> None:
        """Release a lease as its owner. The writer is not told and goes on."""
        leases = self.live()
        lease = leases[pick % len(leases)]
        key = lease.key._replace(generation=lease.first_generation) if older else lease.key
        self.ledger.release(lease.owner, key, self.now)
        self.end(key, lease.owner)
        assert lease not in self.live()

    @precondition(lambda self: self.workers)
    @rule(pick=picks)
    def writer_releases(self, pick: int) -> None:
        """Release a lease as a worker that touches its blocks. The lease may be over already."""
        worker = self.worker(pick)
        self.ledger.release(worker.session, worker.key, self.now)
        self.workers.remove(worker)

    @precondition(lambda self: self.keys)
    @rule(pick=picks, who=picks)
    def only_the_writer_acts(self, pick: int, who: int) -> None:
        """Call an operation that changes nothing, with any session and any recent key. Only the writer may succeed."""
        key, session = self.keys[-1 - pick % min(len(self.keys), 8)], self.session(who)
        may = any((lease.key, lease.writer) == (key, session) for lease in self.live())
        try:
            self.ledger.extend(session, key, 0, self.now)
        except (StaleError, InvalidRequestError):
            assert not may
        else:
            assert may

    # ---- work on blocks

    def act(self, worker: Worker, call: Callable[..., Lease], *args: object) -> Lease | None:
        """Return the lease. If the call says that the lease is over, let the worker stop and return None."""
        try:
            lease = call(worker.session, worker.key, *args, self.now)
        except StaleError:
            self.ledger.release(worker.session, worker.key, self.now)
            self.workers.remove(worker)
            return None
        return lease

    @precondition(lambda self: self.workers)
    @rule(pick=picks)
    def scribble(self, pick: int) -> None:
        self.write(self.worker(pick).story)

    @precondition(lambda self: self.workers)
    @rule(pick=picks, count=st.sampled_from((1, 2, 8)))
    def seal(self, pick: int, count: int) -> None:
        worker = self.worker(pick)
        story = worker.story
        for index, group in enumerate(story.layout.groups):
            first = story.sealed[index]
            last = min(first + count, len(story.context) * 16 // group.block_tokens)
            names = [story.name(index, block) for block in range(first, last)]
            slots = story.tables[index][first:last]
            if NO_SLOT in slots:
                continue
            for slot, name in zip(slots, names):
                self.memory[slot] = story.words[slot] = name
            if self.act(worker, self.ledger.seal, index, first, [name[1] for name in names]) is None:
                return
            story.sealed[index] = last

    @precondition(lambda self: self.workers)
    @rule(pick=picks, place=picks, other=picks, copied=st.booleans())
    def keep(self, pick: int, place: int, other: int, copied: bool) -> None:
        """Keep the blocks at a tail, or copies of them in another lease of the worker."""
        worker = self.worker(pick)
        story = worker.story
        if story.layout is not LAYOUT or not story.context:
            return
        tail = tail_of(story.context, place % len(story.context))
        blocks = [0 if copied else tail.length // group.block_tokens for group in LAYOUT.groups]
        sources = [worker]
        if copied:
            sources = [each for each in self.workers if each.session == worker.session and each.story is not story]
        sources = [each for each in sources if each.story.layout is LAYOUT and each.story.can_write(blocks)]
        if not sources:
            return
        source = sources[other % len(sources)]
        slots = [table[block] for table, block in zip(source.story.tables, blocks)]
        for index, slot in enumerate(slots):
            self.memory[slot] = source.story.words[slot] = (index, tail.name)
        copies = source.key if copied else None

        def call(session: int, key: Key, now: float) -> Lease:
            return self.ledger.keep(session, key, tail, now, copies)

        if self.act(worker, call) is not None:
            for table, block, slot in zip(source.story.tables, blocks, slots):
                table[block] = NO_SLOT
                del source.story.words[slot]

    @precondition(lambda self: self.workers)
    @rule(pick=picks, more=st.text("ef", max_size=3))
    def extend(self, pick: int, more: str) -> None:
        worker = self.worker(pick)
        story = worker.story
        before = self.ledger.counts()
        tokens = (len(story.context) + len(more)) * 16
        try:
            lease = self.act(worker, self.ledger.extend, tokens)
        except (BusyError, InvalidRequestError):
            assert self.ledger.counts() == before
            return
        if lease is not None:
            story.context += more
            story.tables = [list(table) for table in lease.tables]
            self.write(story)

    @precondition(lambda self: self.workers)
    @rule(pick=picks)
    def trim(self, pick: int) -> None:
        worker = self.worker(pick)
        story, group = worker.story, LAYOUT.groups[1]
        if story.layout is not LAYOUT:
            return  # encodings have no window
        kept = min(group.first_needed_block(story.sealed[0] * 16), len(story.tables[1]))
        lease = self.act(worker, self.ledger.trim, 1, kept)
        if lease is not None:
            for slot in held_slots([story.tables[1][:kept]]):
                story.words.pop(slot, None)
            story.tables = [list(table) for table in lease.tables]
            story.sealed[1] = max(story.sealed[1], kept)

    @rule(often=st.integers(0, 3))
    def forget(self, often: int) -> None:
        if often:
            return  # otherwise little would be cached
        before = self.ledger.counts()
        assert self.ledger.forget() == before.cached
        assert self.ledger.counts() == before._replace(free=before.free + before.cached, cached=0)

    # ---- time and lost sessions

    @precondition(lambda self: self.workers)
    @rule(pick=picks)
    def renew(self, pick: int) -> None:
        self.act(self.worker(pick), self.ledger.renew)

    @precondition(lambda self: self.workers)
    @rule(who=picks, often=st.integers(0, 3), pause=st.sampled_from((0.0, 0.4)))
    def lose_session(self, who: int, often: int, pause: float) -> None:
        """Lose a session and replace it. Its worker goes on writing for nearly the whole grace time."""
        if often:
            return  # otherwise nearly all leases would end this way
        lost = self.session(who)
        self.ledger.lose_session(lost, self.now)
        self.sessions[self.sessions.index(lost)] = max(self.sessions) + 1
        for worker in self.workers:
            if worker.session == lost:
                worker.grace_end = self.now + GRACE_SECONDS
        self.advance(pause, sweep=True)

    @precondition(lambda self: self.ledger.leases())
    @rule(seconds=st.sampled_from((0.1, 0.4, GRACE_SECONDS, LEASE / 2, LEASE)), sweep=st.booleans())
    def time_passes(self, seconds: float, sweep: bool) -> None:
        self.advance(seconds, sweep)

    def advance(self, seconds: float, sweep: bool) -> None:
        self.now += seconds
        self.workers = [worker for worker in self.workers if worker.grace_end > self.now]
        if sweep:
            self.ledger.expire(self.now)

    # ---- invariants

    @invariant()
    def the_ledger_proves(self) -> None:
        assert self.ledger.check() == []
        total, *counts = self.ledger.counts()
        assert sum(counts) == total == SLOTS
        groups = count_groups(self.ledger.leases(), self.ledger.cached(), LAYOUT)
        held, in_flight, cached = counts[1:]
        assert sum(groups.used_by_group.values()) == held + in_flight
        assert sum(groups.cached_by_group.values()) == cached

    @invariant()
    def nobody_finds_a_foreign_word(self) -> None:
        live = {lease.key.request_id for lease in self.live()}
        stories = [worker.story for worker in self.workers]
        stories += [story for story in self.stories.values() if story.request in live]
        for story in stories:
            for slot, word in story.words.items():
                assert self.memory[slot] == word

    def teardown(self) -> None:
        """Check that deadlines and lost workers end every lease, and that every block can then be used again."""
        self.ledger.expire(self.now + LEASE)
        assert all(lease.state is State.DRAINING for lease in self.ledger.leases())
        for session in self.sessions:
            self.ledger.lose_session(session, self.now + LEASE)
        self.ledger.expire(self.now + LEASE + GRACE_SECONDS)
        assert self.ledger.leases() == []
        assert self.ledger.check() == []
        counts = self.ledger.counts()
        assert (counts.held, counts.in_flight) == (0, 0)
        self.ledger.reserve(1, Key("last", 1, 1), [], SLOTS // 3 * 32, 0, self.now)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=150, stateful_step_count=80)
