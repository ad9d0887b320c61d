"""A digest that is equal for worlds that differ only in the names of requests, workers, sessions and blocks."""

from __future__ import annotations

import hashlib
import itertools
import marshal
import math
from collections.abc import Iterable

from paceline.core.kv_layout import NO_SLOT
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.claim import Claim
from paceline.services.kvtransfer.ledger.lease import NOBODY, TRANSFER, Lease, State
from tests.proof.parties import Asked, Block, Job, Op, Transfer, Word
from tests.proof.world import World, kind_of, origin


def digest(world: World) -> bytes:
    """Return the digest of a world, 16 bytes.

    State without an effect is left out: times (a lease is either renewed in time or not), the content of free blocks
    that nobody reads, and the memory of attempts to which no message refers.
    """
    looks = [_look(world, index) for index in range(len(world.asked))]
    expected = sorted(looks)
    # Only requests that look alike can change places.
    orders = [
        order for order in itertools.permutations(range(len(looks))) if [looks[index] for index in order] == expected
    ]
    return hashlib.blake2b(min(_Encoder(world, order).encode() for order in orders), digest_size=16).digest()


def _look(world: World, index: int) -> tuple[object, ...]:
    asked, request = world.asked[index], world.request(index)
    jobs = sorted(job.phase for job in world.jobs.values() if job.request == index)
    return (request.text, request.tail, request.one_token, request.media, asked.phase, asked.failures, jobs)


class _Encoder:
    """An encoder of a world for one order of its requests. It numbers names in the order of their first occurrence."""

    def __init__(self, world: World, order: tuple[int, ...]) -> None:
        self._world = world
        self._order = order
        self._rank = {index: rank for rank, index in enumerate(order)}
        self._sessions: dict[int, int] = {NOBODY: 0, TRANSFER: -1}
        self._slots: dict[tuple[int, int], int] = {}
        self._names: dict[tuple[str, int], tuple[int, int, int, int]] = {}

    def encode(self) -> bytes:
        world = self._world
        parts: list[object] = [world.faults]
        for index in self._order:
            parts.append(self._asked(index, world.asked[index]))
            parts.append([self._job(job) for job in self._sorted(world.jobs.values()) if job.request == index])
            for number in range(len(world.hosts)):
                parts.append([self._lease(number, lease) for lease in self._leases(number, index)])
            parts.append([self._transfer(each) for each in self._transfers(index)])
        parts.append([self._job(job) for job in self._sorted(world.ghosts)])
        for queue in sorted(world.queues.values(), key=lambda queue: list(map(self._rank_of, queue))):
            parts.append([self._op(op) for op in queue])
        for late in sorted(world.late, key=lambda late: self._rank_of(late.op)):
            parts.append([*self._op(late.op), late.again])
        parts.append(sorted((world.host_of(session), self._session(session)) for session in world.unnoticed))
        for number, host in enumerate(world.hosts):
            parts.append(host.claims is None)
            claims = host.claims or {}
            for session in sorted(claims, key=self._session):
                parts.append((self._session(session), [self._claim(number, claim) for claim in claims[session]]))
            parts.append(host.ledger._pool.cached())
        return marshal.dumps(parts, 2)  # without references, so that equal parts have equal bytes

    def _asked(self, index: int, asked: Asked) -> object:
        world = self._world
        session = world.sessions[asked.prefiller]
        chosen = asked.phase == "admitting" and asked.prefiller >= 0
        prefiller = (world.host_of(session), self._session(session)) if chosen else 0
        request = world.setup.requests.index(world.request(index))
        told = (asked.opened is not None, asked.filled is not None)
        return (request, asked.failures, asked.phase, prefiller, told, asked.encoded)

    def _sorted(self, jobs: Iterable[Job]) -> list[Job]:
        return sorted(jobs, key=lambda job: (self._name(job.key), job.role, job.phase))

    def _leases(self, host: int, index: int) -> list[Lease]:
        prefix = f"{index}."
        leases = self._world.hosts[host].ledger.leases()
        found = [lease for lease in leases if origin(lease.key.request_id).startswith(prefix)]
        return sorted(found, key=lambda lease: (self._name(lease.key), lease.key.generation))

    def _transfers(self, index: int) -> list[Transfer]:
        found = [each for each in self._world.transfers.values() if each.request == index]
        return sorted(found, key=lambda each: self._name(each.key))

    def _name(self, key: Key) -> tuple[int, int, int, int]:
        """Encode a key as (request, lives ago, attempts ago, for what the lease is)."""
        known = self._names.get(key[:2])
        if known is None:
            index, life = map(int, origin(key.request_id).split("."))
            asked = self._world.asked[index]
            attempt = asked.tries - key[1] if asked.life == life else key[1]
            known = self._names[key[:2]] = (self._rank[index], asked.life - life, attempt, kind_of(key[0]))
        return known

    def _session(self, session: int) -> int:
        return self._sessions.setdefault(session, len(self._sessions))

    def _slot(self, host: int, slot: int) -> int:
        return -1 if slot == NO_SLOT else self._slots.setdefault((host, slot), len(self._slots))

    def _tables(self, host: int, tables: Iterable[Iterable[int]]) -> object:
        return [[self._slot(host, slot) for slot in table] for table in tables]

    def _job(self, job: Job) -> object:
        tables = self._tables(job.host, (*job.tables, job.rows))
        flags = (job.cancelled, job.lost, job.grown, job.alone, job.another, job.context_hash, job.fetch)
        name = (*self._name(job.key), job.key.generation)
        return (job.role, job.host, self._session(job.session), name, job.phase, tables, job.settled, flags)

    def _claim(self, host: int, claim: Claim) -> object:
        tables = self._tables(host, claim.tables)
        return (self._name(claim.key), claim.key.generation, tables, claim.names, claim.active)

    def _transfer(self, each: Transfer) -> object:
        world = self._world
        ended = [world.hosts[host].ledger._book._ended.get(each.id, -1) for host in (each.here, each.there)]
        generations = (each.key.generation, each.source_key.generation, each.adopted is not None)
        stream = [([self._named(each, block) for block in message.blocks], *message[1:]) for message in each.stream]
        ends = (each.reader, each.source, each.cut, each.named, each.named_all, self._session(each.session))
        if each.prefix:
            ends += (each.caller[0], self._flight(each))
        came = (self._tables(each.here, each.tables), each.filled_tokens, sorted(each.come))
        return (self._name(each.key), each.here, each.there, generations, ends, came, stream, ended)

    def _flight(self, each: Transfer) -> object:
        """Encode the links that a transfer brings, or the transfer that it waits for."""
        flights = self._world.hosts[each.here].flights
        ahead = flights._waiting.get(each.id)
        return (sorted(flights._flying.get(each.id, ())), ahead and self._name(Key(*ahead, 1)))

    def _named(self, each: Transfer, block: Block) -> object:
        """Encode a block that is still to be read, with the present state of its slot."""
        host = self._world.hosts[each.there]
        pool = host.ledger._pool
        free = pool._free.index(block.slot) - len(pool._free) if block.slot in pool._free else 0
        digest = self._word(each.key, block.digest)
        where = (self._slot(each.there, block.slot), pool.name(block.slot), free)
        return (block.group, block.index, block.hash, digest, host.memory[block.slot] == block.digest, where)

    def _lease(self, host: int, lease: Lease) -> object:
        owner, writer = self._session(lease.owner), self._session(lease.writer)
        name = (*self._name(lease.key), lease.key.generation, lease.first_generation)
        # A draining lease that waits for its writer differs from one whose grace period runs.
        ending = (lease.deadline <= self._world.now, lease.state is State.DRAINING and lease.deadline < math.inf)
        rest = (lease.state.value, lease.token_count, lease.filled_tokens, lease.context_hash, *ending)
        tables = [[self._block(host, lease, slot) for slot in table] for table in lease.tables]
        return (name, owner, writer, rest, tables)

    def _block(self, host: int, lease: Lease, slot: int) -> object:
        number = self._slot(host, slot)
        if slot == NO_SLOT:
            return number
        pool, memory = self._world.hosts[host].ledger._pool, self._world.hosts[host].memory
        name = pool.name(slot)
        shared = name is not None and pool.find(*name) == slot
        return (number, name, shared, self._word(lease.key, memory[slot]))

    def _word(self, key: Key, word: Word | None) -> object:
        """Encode a block's content. It matters only if it may be shared, or if this attempt has written it."""
        if word is None or not isinstance(word[0], str):
            return word
        return word[2:] if word[:2] == key[:2] else None

    def _rank_of(self, op: Op) -> tuple[object, ...]:
        return (self._name(op.key), op.kind, op.key.generation)

    def _op(self, op: Op) -> list[object]:
        ended = self._world.hosts[op.host].ledger._book._ended.get(op.key[:2], -1)
        name = (op.host, *self._name(op.key), op.key.generation)
        return [self._session(op.session), op.kind, name, op.published, op.another, op.context_hash, ended]
