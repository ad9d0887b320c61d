"""Mutations of the protocol, each without one of its guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from paceline.core.kv_layout import NO_SLOT
from paceline.core.types import Key
from paceline.proto.kvtransfer_pb2 import ExportedBlock
from paceline.services.kvtransfer.ledger.lease import NOBODY, Lease, State
from paceline.services.kvtransfer.ledger.lease_book import LeaseBook
from paceline.services.kvtransfer.ledger.ledger import Ledger
from paceline.services.kvtransfer.transfers.arrivals import Arrivals
from paceline.services.kvtransfer.transfers.exports import Cursor
from paceline.services.kvtransfer.transfers.prefixes import Flights
from tests.proof import claims, encodings, moves, network, transfer, worker
from tests.proof.calls import Answer
from tests.proof.moves import Move
from tests.proof.parties import Job, JobId
from tests.proof.transfer import put
from tests.proof.world import World

Patch = pytest.MonkeyPatch


def without_generation_fence(patch: Patch) -> None:
    """Accept every operation that names the request and attempt of a lease, with any old generation."""

    def find(book: LeaseBook, key: Key, now: float) -> Lease:
        lease = book._alive(key, now)
        return lease if lease is not None else original(book, key, now)

    original = LeaseBook.find
    patch.setattr(LeaseBook, "find", find)
    patch.setattr(LeaseBook, "find_newest", find)


def without_memory_of_ended_keys(patch: Patch) -> None:
    """Treat a late or repeated reservation as a new one."""
    patch.setattr(LeaseBook, "forbid", lambda book, key: None)


def without_quarantine(patch: Patch) -> None:
    """Free the blocks of an ended lease at once, although another worker may still write to them."""

    def drain(book: LeaseBook, lease: Lease, writer: int) -> None:
        book._forget(lease)
        book._give_back(lease)

    patch.setattr(LeaseBook, "_drain", drain)


def without_grace(patch: Patch) -> None:
    """Free the blocks of a worker whose session has ended at once, although a step may still run."""

    def lose_session(book: LeaseBook, session: int, now: float) -> None:
        original(book, session, now)
        for lease in list(book._draining.values()):
            if lease.writer == session:
                book._end_drain(lease)

    original = LeaseBook.lose_session
    patch.setattr(LeaseBook, "lose_session", lose_session)


def without_deadlines(patch: Patch) -> None:
    """Keep leases that nobody renews."""
    patch.setattr(LeaseBook, "_alive", lambda book, key, now: book._live.get(key[:2]))
    patch.setattr(LeaseBook, "expire", lambda book, now: None)


def without_leases_before_the_sweep(patch: Patch) -> None:
    """End a lease only when the ledger is swept, and not at its deadline."""
    patch.setattr(LeaseBook, "_alive", lambda book, key, now: book._live.get(key[:2]))


def without_a_look_at_the_lease_in_a_release(patch: Patch) -> None:
    """Restore an old bug: blocks drained for ever if they were released between the lease's end and the next sweep."""

    def drained(book: LeaseBook, session: int, key: Key, now: float) -> None:
        for lease in [lease for lease in book._draining.values() if lease.key[:2] == key[:2]]:
            if lease.writer == session and lease.first_generation <= key.generation <= lease.key.generation:
                book._end_drain(lease)

    patch.setattr(LeaseBook, "drained", drained)


def without_idempotent_release(patch: Patch) -> None:
    """Give blocks back twice if they are released twice."""

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
    """Hand a prompt over twice if it is declared complete twice."""

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
    """Let a restarted kvtransfer give blocks away before all workers have claimed their leases."""
    patch.setattr(network, "may_reconcile", lambda world, host: world.hosts[host].away)


def without_claims_of_what_has_ended(patch: Patch) -> None:
    """Let a worker leave out claims for lost leases, although its engine may still write to their blocks."""
    original = claims.claims_of
    patch.setattr(claims, "claims_of", lambda world, job: [each for each in original(world, job) if each.active])


def without_truth_about_contents(patch: Patch) -> None:
    """Let a worker claim blocks as sealed before it has written them."""

    def name(world: World, job: Job, group: int, block: int, slot: int) -> bytes:
        digest = world.word(job, group, block)[1]
        return digest if slot != NO_SLOT and isinstance(digest, bytes) else b""

    patch.setattr(claims, "_name", name)


def without_a_look_at_what_was_computed(patch: Patch) -> None:
    """Let decode go on with blocks that were filled under its key, even if they have another prompt."""
    patch.setattr(worker, "is_filled_with_its_own", lambda world, job: True)


def without_a_look_at_what_is_cached(patch: Patch) -> None:
    """Let a prefill worker go on after any cached content of the blocks that decode has reserved."""
    patch.setattr(worker, "goes_on_with_its_own", lambda world, job, opened: True)


def without_digests(patch: Patch) -> None:
    """Do not compare blocks from another host with the digests that were named."""
    patch.setattr(transfer, "damaged", lambda host, blocks, places: False)


def without_seals(patch: Patch) -> None:
    """Let the source name blocks that are not written yet."""

    def sealed(cursor: Cursor, lease: Lease, hash_of: Callable[[int], bytes | None]) -> Iterator[ExportedBlock]:
        return cursor._take(lease, lease.token_count, hash_of, only_sealed=False)

    patch.setattr(Cursor, "sealed", sealed)


def without_the_source_keeping(patch: Patch) -> None:
    """Let the source renew no lease while it is read."""
    patch.setattr(transfer, "keep", lambda world, each, now: False)


def without_the_source_letting_go(patch: Patch) -> None:
    """Let a source keep the lease that it has adopted when its reader is gone."""
    patch.setattr(transfer, "stop_exporting", lambda world, name: put(world, world.transfers[name], source="gone"))


def without_the_reader_letting_go(patch: Patch) -> None:
    """Let a reader keep its lease when it fails."""
    patch.setattr(
        transfer, "stop_reading", lambda world, name: put(world, world.transfers[name], reader="gone", stream=())
    )


def without_arrivals(patch: Patch) -> None:
    """Let a reader that has missed messages treat the transfer as complete."""

    def read(world: World, name: tuple[str, int]) -> None:
        each = world.transfers[name]
        original(world, put(world, each, stream=each.stream[-1:]).id)

    original = transfer.read
    patch.setattr(transfer, "read", read)
    patch.setattr(Arrivals, "check_all", lambda arrivals, tokens: None)


def without_one_flight(patch: Patch) -> None:
    """Let every transfer that lacks a prefix bring it, even if another transfer already does."""

    def ask(flights: Flights[object], caller: object, lacking: Sequence[bytes]) -> bool:
        flights._flying[caller] = frozenset(lacking)
        return True

    patch.setattr(Flights, "ask", ask)


def without_a_word_to_those_who_wait(patch: Patch) -> None:
    """Do not tell waiting transfers that their prefix has arrived or failed."""
    original = Flights.end
    patch.setattr(Flights, "end", lambda flights, caller: original(flights, caller)[:0])


def without_those_who_fly_when_one_who_waits_goes(patch: Patch) -> None:
    """Let a transfer that stops waiting for a prefix end the flight that brings it, for all."""

    def end(flights: Flights[object], caller: object) -> list[object]:
        flights._flying.pop(flights._waiting.get(caller), None)
        return original(flights, caller)

    original = Flights.end
    patch.setattr(Flights, "end", end)


def without_a_look_at_what_an_encoding_lacks(patch: Patch) -> None:
    """Take every lease of an encoding for complete, although none of its rows may be cached."""
    patch.setattr(encodings, "is_complete", lambda world, job, lease: True)


def without_a_lease_of_the_reader(patch: Patch) -> None:
    """Let a prefill worker find the blocks of an encoding, release their lease, and read them later."""

    def answered(world: World, job: Job, answer: Answer) -> None:
        original(world, job, answer)
        world.send(job, "release")

    original = encodings.ANSWERED["pin"]
    patch.setitem(encodings.ANSWERED, "pin", answered)


def without_the_word_of_an_encoding_s_user(patch: Patch) -> None:
    """Restore an old bug: a worker released an encoding whose lease had ended, while its encoder was still writing."""

    def release(world: World, job_id: JobId) -> None:
        world.send(world.put(world.jobs[job_id], lost=True), "release")

    def of_encoding(world: World, job: Job) -> Iterator[Move]:
        if job.renews and not world.hosts[job.host].away and moves._is_lost(world, job):
            yield Move(release, (job.id,))
        yield from original(world, job)

    original = moves._of_encoding
    patch.setattr(moves, "_of_encoding", of_encoding)


def without_claims_of_encodings(patch: Patch) -> None:
    """Let a worker claim only leases of KV, although it is writing or reading an encoding."""
    original = claims.claims_of
    patch.setattr(claims, "claims_of", lambda world, job: [] if job.encoding else original(world, job))
