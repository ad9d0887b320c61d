"""The protocol with one of its guards gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from paceline.core.kv_layout import NO_SLOT
from paceline.core.types import Key
from paceline.proto.kvtransfer_pb2 import ExportedBlock
from paceline.services.kvtransfer.arrivals import Arrivals
from paceline.services.kvtransfer.exports import Cursor
from paceline.services.kvtransfer.flights import Flights
from paceline.services.kvtransfer.lease import NOBODY, Lease, State
from paceline.services.kvtransfer.lease_book import LeaseBook
from paceline.services.kvtransfer.ledger import Ledger
from tests.proof import claims, network, transfer, worker
from tests.proof.parties import Job
from tests.proof.transfer import put
from tests.proof.world import World

Patch = pytest.MonkeyPatch


def without_generation_fence(patch: Patch) -> None:
    """Whoever names a request and attempt reaches its lease, however old the generation."""

    def find(book: LeaseBook, key: Key, now: float) -> Lease:
        lease = book._alive(key, now)
        return lease if lease is not None else original(book, key, now)

    original = LeaseBook.find
    patch.setattr(LeaseBook, "find", find)
    patch.setattr(LeaseBook, "find_newest", find)


def without_memory_of_ended_keys(patch: Patch) -> None:
    """A reservation that comes late or again is a new one."""
    patch.setattr(LeaseBook, "forbid", lambda book, key: None)


def without_quarantine(patch: Patch) -> None:
    """Blocks of a lease that has ended are free at once, although another worker writes."""

    def drain(book: LeaseBook, lease: Lease, writer: int) -> None:
        book._forget(lease)
        book._give_back(lease)

    patch.setattr(LeaseBook, "_drain", drain)


def without_grace(patch: Patch) -> None:
    """Blocks of a worker whose session has ended are free at once, although a step may be under way."""

    def lose_session(book: LeaseBook, session: int, now: float) -> None:
        original(book, session, now)
        for lease in list(book._draining.values()):
            if lease.writer == session:
                book._end_drain(lease)

    original = LeaseBook.lose_session
    patch.setattr(LeaseBook, "lose_session", lose_session)


def without_deadlines(patch: Patch) -> None:
    """A lease that nobody renews lives on."""
    patch.setattr(LeaseBook, "_alive", lambda book, key, now: book._live.get(key[:2]))
    patch.setattr(LeaseBook, "expire", lambda book, now: None)


def without_leases_before_the_sweep(patch: Patch) -> None:
    """A lease ends when the ledger is swept, and not before."""
    patch.setattr(LeaseBook, "_alive", lambda book, key, now: book._live.get(key[:2]))


def without_a_look_at_the_lease_in_a_release(patch: Patch) -> None:
    """As it was before: where the lease was over and nobody had noticed, what was given back drained for ever."""

    def drained(book: LeaseBook, session: int, key: Key, now: float) -> None:
        for lease in [lease for lease in book._draining.values() if lease.key[:2] == key[:2]]:
            if lease.writer == session and lease.first_generation <= key.generation <= lease.key.generation:
                book._end_drain(lease)

    patch.setattr(LeaseBook, "drained", drained)


def without_idempotent_release(patch: Patch) -> None:
    """Releasing twice gives the blocks back twice."""

    def release(ledger: Ledger, session: int, key: Key, now: float) -> None:
        released: dict[Key, list[int]] = ledger.__dict__.setdefault("_released", {})
        if key in released:
            ledger._pool.give_back(released[key])
            return
        lease = next((lease for lease in ledger.leases() if lease.key == key), None)
        if lease is not None and lease.writer == session:
            released[key] = lease.slots()
        original(ledger, session, key, now)

    original = Ledger.release
    patch.setattr(Ledger, "release", release)


def without_idempotent_fill(patch: Patch) -> None:
    """A prompt that is declared complete twice is handed over twice."""

    def fill(ledger: Ledger, session: int, key: Key, filled_tokens: int, now: float, context_hash: bytes) -> Lease:
        ledger._book.drained(session, key, now)
        lease = ledger._book._live.get(key[:2])
        if lease is None:
            return original(ledger, session, key, filled_tokens, now, context_hash)
        if not lease.in_flight:
            ledger._pool.enter_flight(lease.slots())
        lease.state, lease.writer = State.FILLED, NOBODY
        lease.filled_tokens, lease.context_hash = filled_tokens, context_hash
        return lease

    original = Ledger.fill
    patch.setattr(Ledger, "fill", fill)


def without_time_to_come_back(patch: Patch) -> None:
    """A kvtransfer that is started again gives blocks away before all workers have said what they hold."""
    patch.setattr(network, "may_reconcile", lambda world, host: world.hosts[host].away)


def without_claims_of_what_has_ended(patch: Patch) -> None:
    """A worker claims nothing that it lost, although its engine has not let go of it yet."""
    original = claims.claims_of
    patch.setattr(claims, "claims_of", lambda world, job: [each for each in original(world, job) if each.active])


def without_truth_about_contents(patch: Patch) -> None:
    """A worker claims blocks as sealed that it has yet to write."""

    def name(world: World, job: Job, group: int, block: int, slot: int) -> bytes:
        digest = world.word(job, group, block)[1]
        return digest if slot != NO_SLOT and isinstance(digest, bytes) else b""

    patch.setattr(claims, "_name", name)


def without_a_look_at_what_was_computed(patch: Patch) -> None:
    """Decode goes on with any prompt's blocks that were filled under its key."""
    patch.setattr(worker, "is_filled_with_its_own", lambda world, job: True)


def without_a_look_at_what_is_cached(patch: Patch) -> None:
    """A prefill worker goes on behind whatever is in the blocks that decode has reserved."""
    patch.setattr(worker, "goes_on_with_its_own", lambda world, job, opened: True)


def without_digests(patch: Patch) -> None:
    """What came from another host is not compared with what was named."""
    patch.setattr(transfer, "damaged", lambda host, blocks, places: False)


def without_seals(patch: Patch) -> None:
    """The source names blocks that are yet to be written."""

    def sealed(cursor: Cursor, lease: Lease, hash_of: Callable[[int], bytes | None]) -> Iterator[ExportedBlock]:
        return cursor._take(lease, lease.token_count, hash_of, only_sealed=False)

    patch.setattr(Cursor, "sealed", sealed)


def without_the_source_keeping(patch: Patch) -> None:
    """The source renews nothing while it is read."""
    patch.setattr(transfer, "keep", lambda world, each, now: False)


def without_the_source_letting_go(patch: Patch) -> None:
    """A source whose reader is gone keeps what it has taken over."""
    patch.setattr(transfer, "stop_exporting", lambda world, name: put(world, world.transfers[name], source="gone"))


def without_the_reader_letting_go(patch: Patch) -> None:
    """A reader that fails keeps its lease."""
    patch.setattr(
        transfer, "stop_reading", lambda world, name: put(world, world.transfers[name], reader="gone", stream=())
    )


def without_arrivals(patch: Patch) -> None:
    """A reader that has missed a message takes what came for all."""

    def read(world: World, name: tuple[str, int]) -> None:
        each = world.transfers[name]
        original(world, put(world, each, stream=each.stream[-1:]).id)

    original = transfer.read
    patch.setattr(transfer, "read", read)
    patch.setattr(Arrivals, "check_all", lambda arrivals, tokens: None)


def without_one_flight(patch: Patch) -> None:
    """Whoever lacks a prefix brings it, whether or not another does."""

    def ask(flights: Flights[object], caller: object, lacking: Sequence[bytes]) -> bool:
        flights._flying[caller] = frozenset(lacking)
        return True

    patch.setattr(Flights, "ask", ask)


def without_a_word_to_those_who_wait(patch: Patch) -> None:
    """Nobody tells those who wait for a prefix that it has come, or failed."""
    original = Flights.end
    patch.setattr(Flights, "end", lambda flights, caller: original(flights, caller)[:0])


def without_those_who_fly_when_one_who_waits_goes(patch: Patch) -> None:
    """Who waits no longer for a prefix ends the flight that brings it, for all."""

    def end(flights: Flights[object], caller: object) -> list[object]:
        flights._flying.pop(flights._waiting.get(caller), None)
        return original(flights, caller)

    original = Flights.end
    patch.setattr(Flights, "end", end)
